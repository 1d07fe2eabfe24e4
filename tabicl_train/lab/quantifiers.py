"""quantifiers: transformers with softmax and with SSA tell whether every number, or some number, is positive.

The task is priors/quantifiers.py, and training is configs/sweep/quantifiers.yaml, with all of its settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pandas as pd

from priors.quantifiers import QUANTIFIERS
from tabicl_train.config.schema import one_of
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.lab import sequences
from tabicl_train.lab.folder import FEWEST_SEEDS, NO_CLAIM, Folder, Row
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack

LEARNED = 0.01  # as much as one of the 100 samples of the paper's tests; who looks at all numbers is never wrong
KINDS = {"drawn": ", as drawn", "undecided": ", the last number decides"}

QUESTION = """
Each sequence is a string of numbers, and after each number the truth of a sentence about all numbers so far: "every
number is positive", or "some number is positive". The network predicts each truth value from what stands before it. In
training, numbers are drawn from N(0, 1), and sequences have up to 40 of them. The same networks, which differ in how
scores become attention weights only, then see numbers from N(0, sigma^2), and longer sequences. An error is a wrong
truth value after the last number. Nearly all long sequences that are drawn at random are decided early on, so there is
a second kind of test sequences, in which only the last number decides: who answers without looking at it is wrong in
half of the cases.
"""


@dataclass
class Options(sequences.SequenceOptions):
    """tabicl-lab quantifiers folder=DIR [quantifiers=[every,some]]

    Trains small transformers with softmax and with signed averaging (SSA) on the truth of sentences about numbers, and
    tests them on larger numbers and longer sequences. It takes an hour on two CPU cores; when it is stopped, the same
    command continues it.
    """

    quantifiers: list[str] = field(default_factory=lambda: list(QUANTIFIERS))
    """The sentences: every (number is positive), some."""


def run(options: Options) -> None:
    if problems := [line for name in options.quantifiers for line in one_of("quantifiers", name, QUANTIFIERS)]:
        raise ConfigError(problems)
    folder = Folder("quantifiers", options)
    variations = {name: [f"prior.quantifier={name}"] for name in options.quantifiers}

    def errors(network: Network, quantifier: str, draw: Callable[..., Pack]) -> Row:
        found: Row = {}
        for kind in KINDS:
            pack = draw("quantifiers", 2, quantifier=quantifier, undecided=kind == "undecided")
            answers = sequences.predicted(network, pack)[:, -1].argmax(-1)  # (sequences,)
            found[kind] = (answers != pack.y.view(len(pack), -1)[:, -1]).double().mean().item()
        return found

    scores = sequences.scored(folder, options, variations, errors)
    folder.figure("quantifiers", sequences.heat_maps(scores, KINDS, logarithmic=False))
    folder.page("Quantifiers in context", QUESTION, findings(scores))


def findings(scores: pd.DataFrame) -> str:
    seeds, blocks = counted(scores["seed"].nunique(), "seed"), counted(scores["block"].nunique(), "block")
    return f"""
![error by sigma and length](quantifiers.png)

Share of wrong answers after the last number, with 95 % intervals for other seeds of training and other sequences, from
{seeds} and {blocks} of test sequences:

{sequences.comparison(scores, KINDS, ".3f", 1.0)}

{verdict(scores)}

The paper (arXiv 2508.14685) shows heat maps without numbers: with softmax, errors grow with sigma, and with SSA they
stay small. Its networks have 12 layers, 8 heads and width 256, and were trained for 500,000 steps
(`experiment=quantifiers`). configs/sweep/quantifiers.yaml has every setting of the training here, which is the same for
both rules; quantifiers.csv has the scores of each run and block, and runs/ the runs.
"""


def verdict(scores: pd.DataFrame) -> str:
    """What SSA changes where numbers are larger and sequences longer than in training."""
    if scores["seed"].nunique() < FEWEST_SEEDS:
        return NO_CLAIM
    sigma, length = sequences.PLACES[-1]
    claim = f"The claim: SSA has a lower error than softmax at sigma {sigma} and {length} numbers."
    lines = [f"{claim} By the difference:", ""]
    for variation in scores["variation"].unique():
        for kind, title in KINDS.items():
            where = {"variation": variation, "sigma": sigma, "length": length}
            gap = sequences.contrast(scores, kind, 1.0, **where)
            if reached := sequences.undecided(scores, kind, LEARNED, variation=variation):
                result = reached
            elif gap.excludes_zero:
                result = f"{'confirmed' if gap.high < 0 else 'refuted'} by {gap:+.3f}"
            else:
                softmax = sequences.values(scores, kind, rule="softmax", **where).mean()
                result = f"not decided at this size by {gap:+.3f}, where softmax has an error of {softmax:.3f}"
            lines.append(f"- {variation}{title}: {result}.")
    return "\n".join(lines)
