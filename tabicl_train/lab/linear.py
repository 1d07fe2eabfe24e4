"""linear: transformers with softmax and with SSA predict linear functions and points larger than those of training.

The task is lab/priors/linear_functions.py, and lab/configs/sweep/linear.yaml has all settings of the training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import nn

from tabicl_train.console import counted
from tabicl_train.lab import sequences
from tabicl_train.lab.folder import FEWEST_SEEDS, NO_CLAIM, Folder, Row, markdown
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KNOWN = 2  # rows that determine a linear function; errors are those of the rows after them
# A network has learned the task if its error at sigma 1 is at most the highest of the paper's table 1, CosFormer's.
LEARNED = 2e-4
CLAIM = 0.5  # the largest share of softmax's squared error that the paper's SSA has from SHIFT on
PAPER = {  # squared errors at sigma 1 to 10, tables 1 and 4 of arXiv 2508.14685
    "softmax, with MLP": "8e-05 3e-04 6e-03 0.42 1.62 3.84 9.42 13.51 27.99 45.35",
    "SSA, with MLP": "4e-05 3e-04 1e-03 0.02 0.02 0.15 1.24 1.04 2.74 8.5",
    "softmax, without MLP": "0.0 0.0 0.41 1.70 3.92 10.40 14.04 30.20 52.69 79.13",
}
KEYS = ["input_sigma", "sigma", "deviant"]
NORMAL = dict.fromkeys(KEYS, 1)  # as in training
FAR = (30, 100)  # further scales of the points or of the functions, to find boundary values
PLACES = {
    "as in training": NORMAL,
    "functions, sigma 5": NORMAL | {"sigma": sequences.SHIFT},
    "points, sigma 5": NORMAL | {"input_sigma": sequences.SHIFT},
    "functions, sigma 100": NORMAL | {"sigma": 100},
    "points, sigma 100": NORMAL | {"input_sigma": 100},
    "first point times 100": NORMAL | {"deviant": 100},
}

QUESTION = """
Each sequence is a function a x + b with coefficients of its own, told by examples: a point x, its value, the next
point, its value, and so on. The network predicts each value from what stands before it, and two examples would tell the
function. In training, a, b and x are drawn from N(0, 1), and sequences have up to 40 points. The same networks, which
differ in how scores become attention weights only, then see sequences of 40 points whose functions, points or both are
larger, or of which one point is. Whose error stays small?
"""


@dataclass
class LinearOptions(sequences.SequenceOptions):
    """tabicl-lab linear folder=DIR [without_mlp=false]

    Trains small transformers with softmax and with signed averaging (SSA) on linear functions, and tests them on larger
    functions and points. It takes three hours on two CPU cores; when it is stopped, the same command continues it.
    """

    without_mlp: bool = True
    """Also train networks that consist of attention alone."""


def run(options: LinearOptions) -> None:
    folder = Folder("linear", options)
    # Settings of each kind of network.
    variations = {"with MLP": ["model.ff_factor=4"]}
    if options.without_mlp:
        variations["without MLP"] = ["model.ff_factor=0"]

    # Scales of points and functions, further scales of one of them alone, and factors of a single point.
    if options.small:
        sigmas: Sequence[int] = (1, sequences.SHIFT)
        far: Sequence[int] = (100,)
        deviants: Sequence[int] = (100,)
    else:
        sigmas = sequences.SIGMAS
        far = FAR
        deviants = sequences.DEVIANTS

    # Tests are values of KEYS: the scale of the points, the scale of the functions, and the factor of the first point.
    # All pairs of sigmas are tested, and other values one at a time.
    tests = list(itertools.product(sigmas, sigmas, [1]))
    for scale in far:
        tests += [(scale, 1, 1), (1, scale, 1)]
    tests += [(1, 1, factor) for factor in deviants]

    def errors(network: Network, variation: str, draw: Callable[..., Pack]) -> Row:
        """Return the errors of a network in a block of sequences, see `sequences.scored_networks`."""
        # Values and predictions after the examples that determine the function, (sequences, rows).
        num_classes = 0  # the task is regression
        pack = draw("linear_functions", num_classes)
        values = pack.y.view(len(pack), -1)[:, KNOWN:]
        outputs = sequences.predicted(network, pack)[:, KNOWN:, 0]
        # How far each value lies beyond what the network can predict; the error is at least that.
        limit = bound(network)
        beyond = (values.abs() - limit).clamp(min=0)
        return {
            "error": (outputs - values).square().mean().item(),
            "least": beyond.square().mean().item(),
            "largest": outputs.abs().max().item(),
            "largest_value": values.abs().max().item(),
            "bound": limit,
        }

    scores = sequences.scored_networks(folder, options, variations, KEYS, tests, errors)

    # The figures: errors by scale, largest outputs, and errors with one deviant point.
    near = scores[scores[KEYS].max(axis=1) <= max(sigmas)]
    folder.figure("linear", sequences.heat_maps(near[near["deviant"] == 1], "input_sigma", {"error": ""}, True))
    folder.figure("boundary", boundary(scores))
    panels = {}
    for variation, rows in scores.groupby("variation", sort=False):
        panels[variation] = sequences.rows_where(rows, input_sigma=1, sigma=1), "deviant", "error"
    folder.figure("deviant", sequences.lines_of_rules(panels, xscale="log", yscale="log", ylabel="squared error"))
    folder.page("Linear functions in context", QUESTION, findings(scores))


@torch.no_grad()
def bound(network: Network) -> float:
    """Return the largest output that the last LayerNorm allows; inf without that LayerNorm.

    Before its weights g and biases b, a LayerNorm of width E gives vectors with mean 0 and norm sqrt(E). With weights w
    and a bias c of the linear layer, the output is at most sqrt(E) |w g - mean(w g)| + |w b + c|.
    """
    norm, linear = network.head
    if isinstance(norm, nn.Identity):
        return math.inf
    weights = linear.weight[0] * norm.weight
    return ((weights - weights.mean()).norm() * len(weights) ** 0.5 + linear(norm.bias).abs()).item()


def boundary(scores: pd.DataFrame) -> Figure:
    """Draw the largest output by the scale of functions and of points, with the largest value and the bounds."""
    panels = {}
    for variation, rows in scores.groupby("variation", sort=False):
        single_points = sequences.rows_where(rows, deviant=1)
        panels[f"{variation}, functions"] = sequences.rows_where(single_points, input_sigma=1), "sigma", "largest"
        panels[f"{variation}, points"] = sequences.rows_where(single_points, sigma=1), "input_sigma", "largest"
    figure = sequences.lines_of_rules(panels, xscale="log", yscale="log", ylabel="largest output (dotted: bound)")
    for axes, (rows, x, _) in zip(figure.axes, panels.values(), strict=True):
        axes.plot(rows.groupby(x)["largest_value"].mean(), color="0.5", label="largest value")
        for color, (_, rows_of_rule) in zip(("C0", "C1"), rows.groupby("rule", sort=False), strict=True):
            axes.axhline(rows_of_rule["bound"].mean(), color=color, linestyle=":")
    figure.axes[0].legend()
    return figure


def findings(scores: pd.DataFrame) -> str:
    seeds = counted(scores["seed"].nunique(), "seed")
    blocks = counted(scores["block"].nunique(), "block")
    # The scores of a comparison, by their column in linear.csv.
    columns = {"error": ", error", "least": ", least error within the bound", "largest": ", largest output"}
    return f"""
![squared error by sigma of the functions and of the points](linear.png)

Mean squared error over all points after the second, by sigma of the functions (points from N(0, 1)):

{by_sigma(sequences.rows_where(scores, input_sigma=1, deviant=1))}

{verdict(scores)}

With 95 % intervals for other seeds of training and other functions, from {seeds} and {blocks} of test sequences:

{sequences.comparison_table(scores, PLACES, columns, ".3g")}

Does a network have boundary values, which its outputs never exceed? The figure has the largest output in a block of
sequences by scale, in gray the largest of the values that it should predict, and dotted a bound that follows from the
weights: whatever comes before, the last LayerNorm gives vectors of a fixed norm to the linear layer after it. The table
above has the least error that this bound leaves to a network that is right wherever it can be.

![largest output by scale of the functions and of the points](boundary.png)

If only the first point of a sequence is larger than the others, by a factor, the errors at the points after the second
are (the paper's softmax: 0.05 with 10, 0.25 with 20, 0.82 with 40 and 2.2 with 100):

![squared error by the factor of the first point](deviant.png)

The paper's networks have 12 layers, 8 heads and width 256, and were trained for 500,000 steps
(`experiment=linear_functions`); its errors are sums over 38 points divided by 40. lab/configs/sweep/linear.yaml has
every setting of the training here, which is the same for both rules; linear.csv has the scores of each run and block,
and runs/ the runs.
"""


def by_sigma(scores: pd.DataFrame) -> str:
    """Return a table of our mean errors and the paper's, with a row for each kind of network."""
    sigmas = sorted(scores["sigma"].unique())
    rows = []
    for (variation, rule), rows_of_rule in scores.groupby(["variation", "rule"], sort=False):
        means = rows_of_rule.groupby("sigma")["error"].mean()
        rows.append([f"{rule}, {variation}", *(f"{means[sigma]:.3g}" for sigma in sigmas)])
    for name, line in PAPER.items():
        errors = dict(enumerate(line.split(), 1))
        rows.append([f"{name}, paper", *(errors.get(sigma, "") for sigma in sigmas)])
    return markdown(pd.DataFrame(rows, columns=["network", *map(str, sigmas)]))


def verdict(scores: pd.DataFrame) -> str:
    """Return whether the paper's claim holds here, for each kind of network."""
    if scores["seed"].nunique() < FEWEST_SEEDS:
        return NO_CLAIM
    result = []
    for variation, rows in sequences.rows_where(scores, input_sigma=1, deviant=1).groupby("variation", sort=False):
        shifted = rows[rows["sigma"].between(sequences.SHIFT, max(sequences.SIGMAS))]
        # SSA's error minus the claimed share of softmax's, by sigma.
        means = {sigma: sequences.contrast(some_rows, "error", CLAIM) for sigma, some_rows in shifted.groupby("sigma")}
        below = [sigma for sigma, mean in means.items() if mean.high < 0]
        above = [sigma for sigma, mean in means.items() if mean.low > 0]
        not_learned = sequences.undecided(rows[rows["sigma"] == 1], "error", LEARNED)
        if not_learned:
            text = not_learned
        elif len(below) == len(means):
            text = "reproduced: its interval is below one half at each sigma"
        elif above:
            text = f"contradicted: at sigma {', '.join(map(str, above))} it is above one half"
        else:
            text = f"not decided: its interval is below one half at {len(below)} of {len(means)} sigmas"
        result.append(f"- {variation}: {text}.")
    claim = f"The claim: from sigma {sequences.SHIFT} on, SSA has at most half of softmax's squared error."
    return "\n".join([claim, "", *result])
