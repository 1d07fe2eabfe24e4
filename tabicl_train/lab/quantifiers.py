"""quantifiers: transformers with softmax and with SSA tell whether every number, or some number, is positive.

The task is lab/priors/quantifiers.py, and lab/configs/sweep/quantifiers.yaml has all settings of the training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from priors.options import option
from tabicl_train.console import counted
from tabicl_train.lab import sequences
from tabicl_train.lab.causal import weights_of_token
from tabicl_train.lab.folder import FEWEST_SEEDS, NO_CLAIM, Folder, Row
from tabicl_train.lab.priors.quantifiers import QUANTIFIERS
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.model.attention import Attention
from tabicl_train.model.pack import Pack

LEARNED = 0.01  # one of the 100 samples of the paper's tests; a network that looks at all numbers is never wrong
KINDS = {"drawn": ", as drawn", "undecided": ", the last number decides"}
LENGTHS = (10, 20, 40, 100, 200)  # of the test sequences
KEYS = ["sigma", "length", "deviant"]
NORMAL = {"sigma": 1, "length": sequences.TRAINED, "deviant": 1}  # as in training
LARGE = {"sigma": sequences.SHIFT}
LONG = {"length": LENGTHS[-1]}
PLACES = {
    "as in training": NORMAL,
    "sigma 5": NORMAL | LARGE,
    "200 numbers": NORMAL | LONG,
    "sigma 5, 200 numbers": NORMAL | LARGE | LONG,
    "one number times 100": NORMAL | {"deviant": 100},
}
CLAIMS = list(PLACES)[-2:]
WEIGHED = {"as in training": NORMAL, "one number times 100": PLACES["one number times 100"]}
WEIGHTS = {f"weight_{kind}": title for kind, title in KINDS.items()}

QUESTION = """
Each sequence is a string of numbers, and after each number the truth of a sentence about all numbers so far: "every
number is positive", or "some number is positive". The network predicts each truth value from what stands before it. In
training, numbers are drawn from N(0, 1), and sequences have up to 40 of them. The same networks, which differ in how
scores become attention weights only, then see numbers from N(0, sigma^2), and longer sequences. An error is a wrong
truth value after the last number. Nearly all long sequences that are drawn at random are decided early on, so there is
a second kind of test sequences, in which only the last number decides: answers that ignore it are wrong in half of
the cases. Finally, one number is multiplied by a large factor: the last one of a sequence as drawn, so that the
answer is that of the many others; or the first one of a sequence whose last number decides. Answers that follow the
largest number are wrong in half of these cases.
"""


@dataclass
class QuantifiersOptions(sequences.SequenceOptions):
    """tabicl-lab quantifiers folder=DIR [quantifiers=[every,some]]

    Trains small transformers with softmax and with signed averaging (SSA) on the truth of sentences about numbers, and
    tests them on larger numbers and longer sequences. It takes an hour on two CPU cores; when it is stopped, the same
    command continues it.
    """

    quantifiers: list[str] = option(list(QUANTIFIERS), choices=QUANTIFIERS)
    """The sentences: every (number is positive), some."""


def run(options: QuantifiersOptions) -> None:
    folder = Folder("quantifiers", options)
    variations = {name: [f"prior.quantifier={name}"] for name in options.quantifiers}

    # For each kind of sequences, the share of wrong answers, and the last layer's weight on the number that a test
    # multiplies.
    def errors(network: SequenceModel, quantifier: str, draw: Callable[..., Pack]) -> Row:
        attention = network.transformer[-1].attn
        tokens: list[torch.Tensor] = []  # that enter the last layer
        shares_wrong: Row = {}
        for kind in KINDS:
            pack = draw("quantifiers", 2, quantifier=quantifier, undecided=kind == "undecided")
            with attention.register_forward_pre_hook(lambda _, arguments: tokens.append(arguments[0])):
                answers = sequences.predicted(network, pack)[:, -1].argmax(-1)  # (sequences,)
            truth = pack.y.view(len(pack), -1)[:, -1]
            shares_wrong[kind] = (answers != truth).double().mean().item()
            row = 0 if kind == "undecided" else -1
            x = tokens.pop().unflatten(0, (len(pack), -1))  # (sequences, T, E)
            shares_wrong[f"weight_{kind}"] = weight_on(attention, x, row)
        return shares_wrong

    if options.small:
        sigmas: Sequence[int] = (1, sequences.SHIFT)
        lengths: Sequence[int] = (sequences.TRAINED, LENGTHS[-1])
        deviants: Sequence[int] = (100,)
    else:
        sigmas = sequences.SIGMAS
        lengths = LENGTHS
        deviants = sequences.DEVIANTS

    # Tests are values of KEYS. The figures: errors by sigma and length, and errors with one deviant number.
    tests = list(itertools.product(sigmas, lengths, [1]))
    tests += [(1, sequences.TRAINED, factor) for factor in deviants]
    scores = sequences.scored_networks(folder, options, variations, KEYS, tests, errors)
    folder.figure("quantifiers", sequences.heat_maps(scores[scores["deviant"] == 1], "length", KINDS, False))
    panels = {}
    for variation, rows in scores.groupby("variation", sort=False):
        as_in_training = sequences.rows_where(rows, sigma=1, length=sequences.TRAINED)
        for kind, title in KINDS.items():
            panels[f"{variation}{title}"] = as_in_training, "deviant", kind
    folder.figure("deviant", sequences.lines_of_rules(panels, xscale="log", ylim=(-0.02, 0.52), ylabel="error"))
    folder.page("Quantifiers in context", QUESTION, findings(scores))


@torch.no_grad()
def weight_on(attention: Attention, x: torch.Tensor, row: int) -> float:
    """Return the weight that the last number of a sequence gives to another number, mean over heads and sequences.

    Parameters
    ----------
    attention : Attention
        The layer.
    x : Tensor
        The tokens that enter the layer, (sequences, T, E). Sequences have one number in each row.
    row : int
        The row of the other number.

    Returns
    -------
    float
    """
    last_number = x.shape[1] - 2  # the last token is its label
    weights = weights_of_token(attention, x, last_number)  # (sequences, H, last_number + 1)
    on_numbers = weights[..., ::2]  # (sequences, H, rows); each number is followed by its label
    return on_numbers[..., row].mean().item()


def findings(scores: pd.DataFrame) -> str:
    # How many seeds and blocks the intervals are from.
    seeds = counted(scores["seed"].nunique(), "seed")
    blocks = counted(scores["block"].nunique(), "block")
    return f"""
![error by sigma and length](quantifiers.png)

Share of wrong answers after the last number, with 95 % intervals for other seeds of training and other sequences, from
{seeds} and {blocks} of test sequences:

{sequences.comparison_table(scores, PLACES, KINDS, ".3f", 1.0)}

Weight of the last layer, mean over heads, from the last number to the one that the factor multiplies: the last number
itself, or the first one where the last number decides.

{sequences.comparison_table(scores, WEIGHED, WEIGHTS, ".3f", 1.0)}

{verdict(scores)}

If one number is larger than the others, by a factor:

![error by the factor of one number](deviant.png)

The paper (arXiv 2508.14685) shows heat maps without numbers: with softmax, errors grow with sigma, and with SSA they
stay small. Its networks have 12 layers, 8 heads and width 256, and were trained for 500,000 steps
(`experiment=quantifiers`). lab/configs/sweep/quantifiers.yaml has every setting of the training here, which is the same
for both rules; quantifiers.csv has the scores of each run and block, and runs/ the runs.
"""


def verdict(scores: pd.DataFrame) -> str:
    """Return what SSA changes for larger numbers in longer sequences, and for a single large number."""
    if scores["seed"].nunique() < FEWEST_SEEDS:
        return NO_CLAIM
    lines = [f"The claim: SSA has a lower error than softmax ({' and '.join(CLAIMS)}). By the difference:", ""]
    for variation, rows in scores.groupby("variation", sort=False):
        for (kind, title), place in itertools.product(KINDS.items(), CLAIMS):
            rows_there = sequences.rows_where(rows, **PLACES[place])
            gap = sequences.contrast(rows_there, kind)
            not_learned = sequences.undecided(sequences.rows_where(rows, **NORMAL), kind, LEARNED)
            if not_learned:
                result = not_learned
            elif gap.excludes_zero:
                result = f"{'reproduced' if gap.high < 0 else 'contradicted'} by {gap:+.3f}"
            else:
                softmax = sequences.rows_where(rows_there, rule="softmax")[kind].mean()
                result = f"not decided at this size by {gap:+.3f}, where softmax has an error of {softmax:.3f}"
            lines.append(f"- {variation}{title}, {place}: {result}.")
    return "\n".join(lines)
