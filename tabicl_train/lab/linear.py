"""linear: transformers with softmax and with SSA predict linear functions larger than those of training.

The task is priors/linear_functions.py, and training is configs/sweep/linear.yaml, with all of its settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from tabicl_train.console import counted
from tabicl_train.lab import sequences
from tabicl_train.lab.folder import FEWEST_SEEDS, NO_CLAIM, Folder, Row, markdown
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack

KNOWN = 2  # rows that tell a linear function; errors are of those after them
# The highest error at sigma 1 of the trained networks of the paper's table 1, CosFormer's; the closed form has none.
LEARNED = 2e-4
CLAIM = 0.5  # the paper's SSA has at most this share of softmax's squared error, from SHIFT on
PAPER = {  # squared errors at sigma 1 to 10, tables 1 and 4 of arXiv 2508.14685
    "softmax, with MLP": "8e-05 3e-04 6e-03 0.42 1.62 3.84 9.42 13.51 27.99 45.35",
    "SSA, with MLP": "4e-05 3e-04 1e-03 0.02 0.02 0.15 1.24 1.04 2.74 8.5",
    "softmax, without MLP": "0.0 0.0 0.41 1.70 3.92 10.40 14.04 30.20 52.69 79.13",
}

QUESTION = """
Each sequence is a function a x + b with coefficients of its own, told by examples: a point x, its value, the next
point, its value, and so on. The network predicts each value from what stands before it, and two examples would tell the
function. In training, a and b are drawn from N(0, 1), and sequences have up to 40 points. The same networks, which
differ in how scores become attention weights only, then see functions whose coefficients come from N(0, sigma^2), and
longer sequences. Whose error stays small?
"""


@dataclass
class Options(sequences.SequenceOptions):
    """tabicl-lab linear folder=DIR [without_mlp=false]

    Trains small transformers with softmax and with signed averaging (SSA) on linear functions, and tests them on larger
    functions and longer sequences. It takes an hour on two CPU cores; when it is stopped, the same command continues
    it.
    """

    without_mlp: bool = True
    """Also train networks that consist of attention alone."""


def run(options: Options) -> None:
    folder = Folder("linear", options)
    factors = {"with MLP": 4} | ({"without MLP": 0} if options.without_mlp else {})
    variations = {name: [f"model.ff_factor={factor}"] for name, factor in factors.items()}

    def errors(network: Network, variation: str, draw: Callable[..., Pack]) -> Row:
        pack = draw("linear_functions", 0)
        squares = (sequences.predicted(network, pack)[..., 0] - pack.y.view(len(pack), -1)).square()
        return {"error": squares[:, KNOWN:].mean().item()}

    scores = sequences.scored(folder, options, variations, errors)
    folder.figure("linear", sequences.heat_maps(scores, {"error": ""}, logarithmic=True))
    folder.page("Linear functions in context", QUESTION, findings(scores))


def findings(scores: pd.DataFrame) -> str:
    seeds, blocks = counted(scores["seed"].nunique(), "seed"), counted(scores["block"].nunique(), "block")
    return f"""
![squared error by sigma and length](linear.png)

Mean squared error over all points after the second, by sigma, for sequences of {sequences.TRAINED} points:

{by_sigma(scores[scores["length"] == sequences.TRAINED])}

{verdict(scores)}

With 95 % intervals for other seeds of training and other functions, from {seeds} and {blocks} of test sequences:

{sequences.comparison(scores, {"error": ""}, ".3g")}

The paper's networks have 12 layers, 8 heads and width 256, and were trained for 500,000 steps
(`experiment=linear_functions`); its errors are sums over 38 points divided by 40. configs/sweep/linear.yaml has every
setting of the training here, which is the same for both rules; linear.csv has the scores of each run and block, and
runs/ the runs.
"""


def by_sigma(scores: pd.DataFrame) -> str:
    """Our means and the paper's, a row for each kind of network."""
    sigmas = sorted(scores["sigma"].unique())
    rows = []
    for (variation, rule), own in scores.groupby(["variation", "rule"], sort=False):
        means = own.groupby("sigma")["error"].mean()
        rows.append([f"{rule}, {variation}", *(f"{means[sigma]:.3g}" for sigma in sigmas)])
    for name, line in PAPER.items():
        errors = dict(enumerate(line.split(), 1))
        rows.append([f"{name}, paper", *(errors.get(sigma, "") for sigma in sigmas)])
    return markdown(pd.DataFrame(rows, columns=["network", *map(str, sigmas)]))


def verdict(scores: pd.DataFrame) -> str:
    """Whether the paper's claim holds here, for each kind of network."""
    if scores["seed"].nunique() < FEWEST_SEEDS:
        return NO_CLAIM
    sigmas, lines = sorted(sigma for sigma in scores["sigma"].unique() if sigma >= sequences.SHIFT), []
    for variation in scores["variation"].unique():
        where = {"variation": variation, "length": sequences.TRAINED}
        means = {sigma: sequences.contrast(scores, "error", CLAIM, sigma=sigma, **where) for sigma in sigmas}
        below = [sigma for sigma, mean in means.items() if mean.high < 0]
        above = [sigma for sigma, mean in means.items() if mean.low > 0]
        if reached := sequences.undecided(scores, "error", LEARNED, variation=variation):
            result = reached
        elif len(below) == len(sigmas):
            result = "confirmed: its interval is below one half at each sigma"
        elif above:
            result = f"refuted: at sigma {', '.join(map(str, above))} it is above one half"
        else:
            result = f"not decided: its interval is below one half at {len(below)} of {len(sigmas)} sigmas"
        lines.append(f"- {variation}: {result}.")
    claim = f"The claim: from sigma {sequences.SHIFT} on, SSA has at most half of softmax's squared error."
    return "\n".join([claim, "", *lines])
