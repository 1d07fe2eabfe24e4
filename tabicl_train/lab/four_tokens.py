"""four_tokens: causal attention of four tokens in numbers, and why scores are divided by the square root of d."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from priors.options import option
from priors.random import rng_at
from tabicl_train.evaluation.statistics import Estimate, mean_interval
from tabicl_train.lab.causal import CausalSpans, attend_causally
from tabicl_train.lab.folder import Folder, markdown, plot_estimates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = ["policy", "raises", "wages", "jobs"]
SEED = 7
WIDTH, HEAD = 6, 4  # width of a token, and elements of the only head
DIMS = (4, 16, 64, 256)  # elements of a head for which the variance of scores is measured
BLOCKS, QUERIES, KEYS = 20, 100, 64  # blocks of random queries, and queries and keys of each block

QUESTION = """
Each of four tokens asks which of the tokens up to itself matter to it. Three matrices make a query, a key and a value
of each token; scores are products of queries and keys; they are divided by the square root of the length of a key;
later tokens are hidden; softmax turns the rest into weights; and the weights mix the values. Tokens and matrices are
random numbers, with seed 7: the page shows the arithmetic, not a language.
"""


@dataclass
class FourTokensOptions:
    """tabicl-lab four_tokens folder=DIR

    Causal attention of four tokens, each step in numbers; and the variance of scores by the length of a key.
    """

    folder: str = option()
    """Folder to write."""
    small: bool = False
    """Fewer random queries."""


@dataclass
class HeadSteps:
    """The arithmetic of one causal head in float64 arrays with a row for each token.

    Parameters
    ----------
    q, k, v : ndarray
        Queries, keys and values, (4, 4).
    scores, divided : ndarray
        q.k, and the same divided by sqrt(4), (4, 4).
    weights, context : ndarray
        Weights and output of the causal attention of this package, (4, 4).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    divided: np.ndarray
    weights: np.ndarray
    context: np.ndarray


def run(options: FourTokensOptions) -> None:
    folder = Folder("four_tokens", options)
    steps = compute_steps()
    folder.csv("weights", pd.DataFrame(steps.weights, index=TOKENS, columns=TOKENS).rename_axis("query").reset_index())
    variances = measure_variances(2 if options.small else BLOCKS)
    folder.csv("four_tokens", variances)
    folder.figure("four_tokens", draw_steps(steps))
    folder.figure("variance", draw_variances(variances))
    folder.page("Four tokens through causal attention", QUESTION, findings(steps, variances))


def compute_steps() -> HeadSteps:
    """Draw the tokens and matrices of the example, and attend."""
    rng = np.random.default_rng(SEED)
    X = rng.normal(size=(len(TOKENS), WIDTH))
    q, k, v = (X @ (rng.normal(size=(WIDTH, HEAD)) / np.sqrt(WIDTH)) for _ in range(3))
    scores = q @ k.T
    spans = CausalSpans([(1, len(TOKENS))])

    def attend(values: np.ndarray) -> np.ndarray:
        qkv = torch.from_numpy(np.stack([q, k, values], 1)[:, :, None])  # (4, 3, 1, 4)
        return attend_causally(qkv, spans, None, 0.0)[:, 0].numpy()

    weights = attend(np.eye(len(TOKENS)))  # one-hot values return the weights
    return HeadSteps(q, k, v, scores, scores / np.sqrt(HEAD), weights, attend(v))


def measure_variances(blocks: int) -> pd.DataFrame:
    """Measure the scores of independent normal queries and keys.

    Parameters
    ----------
    blocks : int
        Number of blocks of random queries.

    Returns
    -------
    DataFrame
        A row for each d, the number of elements of a head, and each block: d, block, variance (of q.k),
        variance_divided (of q.k / sqrt(d)), top (mean of the largest softmax weight among 64 keys) and top_divided.
    """
    rows = []
    for d in DIMS:
        for block in range(blocks):
            rng = rng_at(("four_tokens", d, block), "vectors")
            q = rng.standard_normal((QUERIES, d))
            k = rng.standard_normal((QUERIES, KEYS, d))
            scores = np.einsum("qd,qkd->qk", q, k)
            divided = scores / np.sqrt(d)
            rows.append(
                {
                    "d": d,
                    "block": block,
                    "variance": scores.var(),
                    "variance_divided": divided.var(),
                    "top": largest_weights(scores).mean(),
                    "top_divided": largest_weights(divided).mean(),
                }
            )
    return pd.DataFrame(rows)


def largest_weights(scores: np.ndarray) -> np.ndarray:
    """Return the largest softmax weight of each query, (queries,), from scores (queries, keys)."""
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return 1 / odds.sum(1)


def draw_steps(steps: HeadSteps) -> Figure:
    from matplotlib.figure import Figure

    # Four pictures in a row, one for each step; all but the weights have the same scale of colors.
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    hidden = np.triu(np.ones_like(steps.weights, dtype=bool), 1)
    masked = np.where(hidden, np.nan, steps.divided)
    pictures = {"q.k": steps.scores, "divided by sqrt(4)": steps.divided, "later tokens hidden": masked}
    pictures |= {"weights": steps.weights}
    largest = np.abs(steps.scores).max()
    for axes, (title, values) in zip(figure.subplots(1, len(pictures)), pictures.items(), strict=True):
        if title == "weights":
            axes.imshow(values, cmap="Blues", vmin=0, vmax=1)
        else:
            axes.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest)

        # Numbers in the cells, white on dark colors.
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = abs(value) > 0.6 * (1 if title == "weights" else largest)
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
        axes.set_xticks(range(len(TOKENS)), TOKENS)
        axes.set_yticks(range(len(TOKENS)), TOKENS)
        axes.set(title=title, xlabel="key")
    figure.axes[0].set_ylabel("query")
    return figure


def draw_variances(variances: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = {"": "q.k", "_divided": "q.k / sqrt(d)"}
    for ending, label in labels.items():
        plot_estimates(left, by_dim(variances, f"variance{ending}"), label=label)
        plot_estimates(right, by_dim(variances, f"top{ending}"), label=label)
    left.plot(DIMS, DIMS, ":", color="0.5", label="d")
    left.set(title="variance of a score", xscale="log", yscale="log", xlabel="values of a head, d")
    right.axhline(1 / KEYS, color="0.5", linestyle=":")
    title = f"largest of {KEYS} weights (dotted: equal weights)"
    right.set(title=title, xscale="log", ylim=(-0.02, 1.02), xlabel="values of a head, d")
    left.legend()
    return figure


def by_dim(variances: pd.DataFrame, column: str) -> pd.Series:
    """Return the mean of a column over blocks as an Estimate for each d."""
    means: dict[int, Estimate] = {}
    for d, rows in variances.groupby("d"):
        means[d] = mean_interval(rows[column].to_numpy())
    return pd.Series(means, dtype=object)


def findings(steps: HeadSteps, variances: pd.DataFrame) -> str:
    def table(values: np.ndarray, columns: list[str]) -> str:
        frame = pd.DataFrame(values, index=TOKENS, columns=columns).map("{:.3f}".format)
        return markdown(frame.rename_axis("token").reset_index())

    # The values of a head, by number, and the variances of scores with intervals over blocks.
    numbers = [str(number) for number in range(1, HEAD + 1)]
    columns = ("variance", "variance_divided", "top", "top_divided")
    measured = pd.DataFrame({column: by_dim(variances, column) for column in columns})
    return f"""
![scores, divided scores, visible scores and weights](four_tokens.png)

Weights, a row for each query:

{table(steps.weights, TOKENS)}

Every row sums to {steps.weights.sum(1).min():.6f}. The context vectors, weights times values:

{table(steps.context, numbers)}

## Why scores are divided

![variance of scores and largest weight by values of a head](variance.png)

A score is a sum of d products. If the elements of queries and keys are independent, with mean 0 and variance 1, its
variance is d, and that of the score divided by sqrt(d) is 1. Without the division, softmax gives nearly all weight to
one of {KEYS} random keys where d is large, although none is better than another. With 95 % intervals for other blocks
of {QUERIES} queries and {KEYS} keys each:

{markdown(measured.rename_axis("d").reset_index())}

In a trained network the elements are not independent; `tabicl-lab attention` shows the scores of one before and after
the division.
"""
