"""scores: linear functions in context with more scoring functions, other heads, and wider training.

The task is lab/priors/linear_functions.py, and lab/configs/sweep/scores.yaml has all settings of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from priors.options import option
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab import linear, sequences
from tabicl_train.lab.folder import (
    FEWEST_SEEDS,
    NO_CLAIM,
    Folder,
    Row,
    by_seed_and_table,
    markdown,
    plot_estimates,
    setting_of_labels,
)
from tabicl_train.model.attention import Attention, Block
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ["input_sigma", "sigma", "deviant"]
RULES = ("softmax", "SSA", "CosFormer", "SA-Softmax", "no attention")  # labels of the sweep
WIDE = "points of sigma 10"
VARIATIONS = {
    "as in linear": [],
    "outputs times 8": ["model.output_scale=8"],  # raises the bound at the start; after training 14.3 against 12.9
    "no last LayerNorm": ["model.head_norm=false"],
    WIDE: ["prior.input_sigma=10"],  # N(0, 10) of the paper, which also trains with N(0, 100)
}
# Standard deviations of the points and of the coefficients, and factor of the first point.
TESTS = {
    "points 0.3": (0.3, 1, 1),
    "all 1": (1, 1, 1),  # as in training, except for WIDE
    "points 5": (5, 1, 1),
    "points 10": (10, 1, 1),
    "coefficients 5": (1, 5, 1),
    "coefficients 5, points 0.3": (0.3, 5, 1),
    "both 5": (5, 5, 1),
    "first point x 10": (1, 1, 10),
    "first point x 100": (1, 1, 100),
    "first point x 1,000": (1, 1, 1000),
}
FAR = "coefficients 5"  # the test of the paper's table 1
STEEP = "coefficients 5, points 0.3"  # functions as in FAR, but 60 % of the sequences have no value above WITHIN
WITHIN = 7.0  # 99 % of the training sequences have no larger value
PAPER = {"softmax": 1.62, "SSA": 0.02, "CosFormer": 5.10, "SA-Softmax": 3.83}  # in the test FAR

QUESTION = """
The task is that of `tabicl-lab linear`: predict the values of a linear function from examples. Up to five networks
differ in how scores become weights: softmax, signed averaging (SSA), CosFormer, SA-Softmax, or no attention at all. All
are trained in variations: as there; with outputs multiplied by 8, which raises the bound that the last LayerNorm sets,
unless training makes its weights smaller; without that LayerNorm; and with points from a normal distribution of
standard deviation 10, which should help with deviant points and be worse near zero.
"""


@dataclass
class ScoresOptions(sequences.SequenceOptions):
    """tabicl-lab scores folder=DIR ['variations=[outputs times 8]'] [rules=[softmax,SSA]] [steps=12000]

    Trains small transformers with five scoring functions on linear functions, in four variations. A network takes about
    20 minutes on a core, and there are three for each rule and variation, so all of them take 20 hours. When it is
    stopped, the same command continues it; further variations may be added later, other rules need another folder.
    """

    variations: list[str] = option(list(VARIATIONS), choices=VARIATIONS)
    """Which variations are trained: as in linear, outputs times 8, no last LayerNorm, points of sigma 10."""
    rules: list[str] = option(list(RULES), choices=RULES)
    """Which networks are trained: softmax, SSA, CosFormer, SA-Softmax, no attention; the others are compared with the
    first one."""
    steps: int = option(12_000, at_least=1)
    """Steps of training of each network."""


def run(options: ScoresOptions) -> None:
    if not (options.variations and options.rules):
        raise ConfigError(["variations or rules is empty; name at least one of each"])
    folder = Folder("scores", options)
    steps = f"curriculum.stages.sequences.steps={options.steps}"
    rules = setting_of_labels("rule", options.rules)
    variations = {name: [steps, rules, *VARIATIONS[name]] for name in options.variations}

    # A row of scores.csv. Errors are those of the rows after the ones that determine a function.
    def errors(network: Network, variation: str, draw: Callable[..., Pack]) -> Row:
        pack = draw("linear_functions", 0)
        all_values = pack.y.view(len(pack), -1)  # (sequences, rows)
        values = all_values[:, linear.KNOWN :]
        found = sequences.predicted(network, pack)[:, linear.KNOWN :, 0]
        limit = network.config.output_scale * linear.bound(network)
        beyond = (values.abs() - limit).clamp(min=0)
        squares = (found - values).square()
        is_within = all_values.abs().amax(1) <= WITHIN
        return {
            "error": squares.mean().item(),
            "within": squares[is_within].mean().item(),  # nan without such sequences
            "least": beyond.square().mean().item(),
            "largest": found.abs().max().item(),
            "largest_value": values.abs().max().item(),
            "bound": limit,
            "weights": query_and_key_weights(network),
        }

    scores = sequences.scored_networks(folder, options, variations, KEYS, list(TESTS.values()), errors)
    folder.figure("scores", draw_errors(scores))
    folder.page("Scoring functions on linear functions", QUESTION, findings(scores))


def query_and_key_weights(network: Network) -> float:
    """Return the root mean square of the weights that map normalized tokens to queries and keys; nan without attention.

    They include the gain of the LayerNorm before them, since only the product has an effect.
    """
    weights = []
    for block in network.modules():
        if isinstance(block, Block) and isinstance(block.attn, Attention):
            both = block.attn.in_proj_weight[: 2 * block.attn.dim]  # (2 E, E) of queries and keys
            weights.append((both * block.norm1.weight).flatten())
    return torch.cat(weights).square().mean().sqrt().item() if weights else math.nan


def rows_of_test(scores: pd.DataFrame, test: str) -> pd.DataFrame:
    """Return the rows of one of the TESTS."""
    return sequences.rows_where(scores, **dict(zip(KEYS, TESTS[test], strict=True)))


def draw_errors(scores: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    variations = list(scores["variation"].unique())
    figure = Figure(figsize=(1 + 5 * len(variations), 4.4), layout="constrained")
    for axes, variation in zip(figure.subplots(1, len(variations), squeeze=False)[0], variations, strict=True):
        rows_of_variation = sequences.rows_where(scores, variation=variation)
        for rule, rows in rows_of_variation.groupby("rule", sort=False):
            means = {}
            for place, test in enumerate(TESTS):
                means[place] = mean_interval(by_seed_and_table(rows_of_test(rows, test), "error", "block"), 0.0)
            plot_estimates(axes, pd.Series(means, dtype=object), label=rule)
        axes.set_xticks(range(len(TESTS)), TESTS, rotation=35, ha="right")
        axes.set(title=variation, yscale="log", ylabel="squared error")
    figure.axes[0].legend(fontsize="small")
    return figure


def findings(scores: pd.DataFrame) -> str:
    seeds = scores["seed"].nunique()

    # A section for each variation: errors by rule and test, differences from the first rule, the verdict on the paper's
    # claim, and what the outputs are far from training.
    parts = []
    for variation, own in scores.groupby("variation", sort=False):
        rows = []
        for rule, rows_of_rule in own.groupby("rule", sort=False):
            cells = []
            for test in TESTS:
                cells.append(interval_cell(by_seed_and_table(rows_of_test(rows_of_rule, test), "error", "block")))
            rows.append([rule, *cells])
        title = f"## {str(variation)[0].upper()}{str(variation)[1:]}"
        parts += [title, markdown(pd.DataFrame(rows, columns=["network", *TESTS]))]
        if own["rule"].nunique() > 1:
            parts.append(contrasts(own))
        answer = verdict(own)
        if answer is not None and variation != WIDE:  # the claim is about networks trained with points of sigma 1
            parts.append(answer)
        parts.append(facts_of_far(own))
    if scores["variation"].nunique() > 1:
        parts += [
            "## Between variations",
            "On the same sequences, a row for each network:",
            changes_by_variation(scores),
        ]

    # The text around the sections.
    text = "\n\n".join(parts)
    paper = ", ".join(f"{rule} {error:g}" for rule, error in PAPER.items())
    blocks = counted(scores["block"].nunique(), "block")
    sample = f"from {counted(seeds, 'seed')} and {blocks} of test sequences"
    too_few = f"{NO_CLAIM}\n\n" if seeds < FEWEST_SEEDS else ""
    return f"""
![squared error by test](scores.png)

Squared errors with 95 % intervals for other seeds of training and other sequences, {sample}.
{too_few}A comparison of rules is meaningful only if they have learned the task: if their error in the test "all 1" is
at most {linear.LEARNED:g}. Networks trained with points of sigma 10 have learned theirs if their error in the test
"points 10" is small.

Tests are named by the standard deviations that are not 1; in some of them the first point is multiplied by a factor.

In the tables about {FAR}, **bound** is the largest output that the weights after the last LayerNorm allow, and **least
error** is the error of a network that is right wherever this bound allows it. **largest output** and **largest value**
are means, over blocks, of the largest in a block. Without that LayerNorm there is no bound.

**error within {WITHIN:g}** is the error on sequences whose values all lie within {WITHIN:g}, like 99 % of the training
sequences; a block with few of them counts like any other. With points of sigma 0.3, many of these sequences belong to
steeper functions. **weights** is the root mean square of the weights of queries and keys.

{text}

The paper (arXiv 2508.14685, table 1) has, for coefficients of sigma 5: {paper}. lab/configs/sweep/scores.yaml has every
setting of the training; scores.csv has the scores of each run and block, and runs/ the runs.
"""


def verdict(scores: pd.DataFrame) -> str | None:
    """Return whether SSA has at most half of softmax's error in the test FAR; None without both or with few seeds."""
    scores = scores[scores["rule"].isin(["softmax", "SSA"])]
    if scores["rule"].nunique() < 2 or scores["seed"].nunique() < FEWEST_SEEDS:
        return None
    claim = f"The claim, that SSA has at most half of softmax's error with {FAR}, is"
    not_learned = sequences.undecided(rows_of_test(scores, "all 1"), "error", linear.LEARNED)
    if not_learned is not None:
        return f"{claim} {not_learned}."
    excess = sequences.contrast(rows_of_test(scores, FAR), "error", linear.CLAIM)
    if excess.high < 0:
        answer = "reproduced"
    elif excess.low > 0:
        answer = "contradicted"
    else:
        answer = "not decided"
    return f"{claim} {answer}: SSA's minus half of softmax's is {excess:+.3g}."


def facts_of_far(scores: pd.DataFrame) -> str:
    """Return a table of what outputs are and could be in the test FAR, and of the weights of queries and keys."""
    rows = []
    for rule, rows_of_rule in scores.groupby("rule", sort=False):
        far = rows_of_test(rows_of_rule, FAR)
        cells = []
        for column in ("largest_value", "largest", "bound", "least", "within"):
            cells.append(interval_cell(by_seed_and_table(far, column, "block")))
        cells.append(interval_cell(by_seed_and_table(rows_of_test(rows_of_rule, STEEP), "within", "block")))
        cells.append(interval_cell(weights_by_seed(far)))
        rows.append([rule, *cells])
    within = f"error within {WITHIN:g}"
    columns = ["largest value", "largest output", "bound", "least error", within, f"{within}, points 0.3", "weights"]
    return markdown(pd.DataFrame(rows, columns=[f"network, {FAR}", *columns]))


def interval_cell(values: np.ndarray, is_difference: bool = False) -> str:
    """Format the mean with its interval, which is cut at 0 except for a difference; "none" if no value is finite."""
    if not np.isfinite(values).any():
        return "none"
    if is_difference:
        return f"{mean_interval(values):+.3g}"
    return f"{mean_interval(values, 0.0):.3g}"


def weights_by_seed(scores: pd.DataFrame) -> np.ndarray:
    """Return the weights of queries and keys of one rule and variation, in the order of the seeds."""
    return scores.groupby("seed")["weights"].first().to_numpy(float)


def contrasts(scores: pd.DataFrame) -> str:
    """Return a table of the errors of each rule minus those of the first one on the same sequences."""
    rules = list(scores["rule"].unique())
    rows = []
    for rule in rules[1:]:
        cells = []
        for test in TESTS:
            errors = {}
            for name, rows_of_rule in rows_of_test(scores, test).groupby("rule"):
                errors[name] = by_seed_and_table(rows_of_rule, "error", "block")
            cells.append(interval_cell(errors[rule] - errors[rules[0]], is_difference=True))
        rows.append([f"{rule} minus {rules[0]}", *cells])
    return markdown(pd.DataFrame(rows, columns=["difference", *TESTS]))


def changes_by_variation(scores: pd.DataFrame) -> str:
    """Return a table of the errors of each variation minus those of the first one on the same sequences, by rule."""
    first, *others = scores["variation"].unique()
    rows = []
    for rule, rows_of_rule in scores.groupby("rule", sort=False):
        for variation in others:
            cells = []
            for test in TESTS:
                own = rows_of_test(rows_of_rule, test)
                before = by_seed_and_table(sequences.rows_where(own, variation=first), "error", "block")
                after = by_seed_and_table(sequences.rows_where(own, variation=variation), "error", "block")
                cells.append(interval_cell(after - before, is_difference=True))
            before = weights_by_seed(sequences.rows_where(rows_of_rule, variation=first))
            after = weights_by_seed(sequences.rows_where(rows_of_rule, variation=variation))
            cells.append(interval_cell(after - before, is_difference=True))
            rows.append([f"{rule}: {variation} minus {first}", *cells])
    return markdown(pd.DataFrame(rows, columns=["difference", *TESTS, "weights"]))
