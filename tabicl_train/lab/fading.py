"""fading: the weight of one relevant key among n - 1 others of equal score, in closed form for each scoring rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from priors.options import option
from tabicl_train.lab.folder import Folder, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 100  # largest gap, up to which no power or exponential overflows
SCALE = 0.43  # s in the multiplier s log n of SSMax
GATES = 0.5, 1.5  # factors of QASSMax, between 0 and 2, by which the gate of a query changes that multiplier
EXPONENT = 1.5  # p of SSA
OTHERS = 0.0, -2.5  # scores of the other keys under SSA, whose weights depend on both scores, not on their gap alone

QUESTION = """
An attention layer looks something up: it compares a query with n keys, turns the scores into weights that sum to one,
and returns the mean of what stands behind the keys by these weights. If one key is the right one and its score exceeds
that of all others by a fixed gap, its weight should stay near 1. Under the usual rule, softmax, it does not: the others
are many, their small weights add up, and from some n on the right key is lost in the crowd. That is attention fading.
The rules compared here let scores depend on n (SSMax, QASSMax) or replace the exponential (SSA).
"""


@dataclass
class FadingOptions:
    """tabicl-lab fading folder=DIR [gap=5]

    The weight of one relevant key among n - 1 others of equal score, for n from 10 to a million, under each rule.
    """

    folder: str = option()
    """Folder to write."""
    gap: float = option(5.0, at_least=0, at_most=LARGEST)
    """By how much the score of the relevant key exceeds that of the others."""
    small: bool = False
    """Fewer values of n."""


def run(options: FadingOptions) -> None:
    folder = Folder("fading", options)
    frame = fading_curves(options)
    folder.csv("fading", frame)
    folder.figure("fading", draw(frame, options.gap))
    folder.page("Attention fading", QUESTION, findings(frame, options))


def weight(n: np.ndarray, gap: float, multiplier: np.ndarray | float = 1.0) -> np.ndarray:
    """Return the softmax weight of a key whose score exceeds that of n - 1 others by a gap.

    Parameters
    ----------
    n : ndarray
        Numbers of keys.
    gap : float
        The difference of the scores.
    multiplier : ndarray or float, optional
        Factor of the scores: 1 for softmax, s log n for SSMax (arXiv 2501.19399), and for QASSMax (arXiv 2602.11139)
        with equal elements base(n) * gate.

    Returns
    -------
    ndarray
        1 / (1 + (n - 1) exp(-gap * multiplier)), in the shape of n.
    """
    return 1 / (1 + (n - 1) * np.exp(-gap * multiplier))


def ssa_weight(n: np.ndarray, relevant: float, other: float, exponent: float, b: float = 1.0) -> np.ndarray:
    """Return the SSA weight (arXiv 2508.14685) of a key with score `relevant` among n - 1 keys with score `other`.

    A score z counts as (1 + b |z|)^(sgn(z) p), with p = `exponent`, where softmax has exp(z).
    """
    odds = ssa_score(other, exponent, b) / ssa_score(relevant, exponent, b)
    return 1 / (1 + (n - 1) * odds)


def ssa_score(z: float, exponent: float, b: float) -> float:
    return (1 + b * abs(z)) ** math.copysign(exponent, z)


def fading_curves(options: FadingOptions) -> pd.DataFrame:
    """Return a row for each rule and n: rule, n, weight."""
    n = np.unique(np.geomspace(10, 1e6, 6 if options.small else 51).round())
    multiplier = SCALE * np.log(n)
    rules = {"softmax": weight(n, options.gap), "SSMax": weight(n, options.gap, multiplier)}
    for gate in GATES:
        rules[f"QASSMax, gate {gate:g}"] = weight(n, options.gap, gate * multiplier)
    for other in OTHERS:
        rules[f"SSA, others at {other:g}"] = ssa_weight(n, other + options.gap, other, EXPONENT)
    frames = [pd.DataFrame({"rule": rule, "n": n.astype(int), "weight": w}) for rule, w in rules.items()]
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame, gap: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for rule, rows in frame.groupby("rule", sort=False):
        style = "-"
        if "SSA" in str(rule):
            style = "-."
        elif "QASSMax" in str(rule):
            style = "--"
        axes.plot(rows["n"], rows["weight"], style, label=rule)
    axes.set(xscale="log", ylim=(-0.02, 1.02), xlabel="keys n", ylabel="weight of the relevant key")
    axes.set_title(f"one key {gap:g} above n - 1 equal ones")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def findings(frame: pd.DataFrame, options: FadingOptions) -> str:
    # Weights at powers of ten, and the numbers of the formulas below.
    shown = frame[frame["n"].isin([10**power for power in range(1, 7)])]
    table = shown.pivot(index="rule", columns="n", values="weight").loc[frame["rule"].unique()].map("{:.4f}".format)
    table.columns = pd.Index([f"n = {n:,}" for n in table.columns])
    slope = SCALE * options.gap
    half = 1 + math.exp(options.gap)  # number of keys with which the relevant one has half of the weight
    return f"""
![weight of the relevant key by number of keys](fading.png)

{markdown(table.reset_index())}

- **softmax**: 1 / (1 + (n - 1) exp(-D)) with the gap D = {options.gap:g}. At n = 1 + exp(D) = {half:,.0f} the relevant
  key has half of the weight; ten times as many keys leave it a tenth of its odds.
- **SSMax**: scores are multiplied by s log n, so exp(-D) becomes n^(-sD). The weight tends to 1 if sD is above 1, to 0
  if it is below; here sD = {slope:.3g}.
- **QASSMax**: the multiplier is a learned function of log n, times a gate between 0 and 2 that each query sets for
  itself. Here the function is that of SSMax, so the gate decides how fast the weight tends to its limit, and to which.
- **SSA**: a score z counts (1 + b |z|)^(sgn(z) p), here with p = {EXPONENT:g} and b = 1. That grows as a power
  of z, not exponentially, so that no single score decides alone, and the relevant key fades earlier at equal scores. It
  depends on both scores, not on their gap alone.

These are formulas: there are no seeds, and no intervals. How large a gap and multiplier a network learns depends on its
size and training, about which they say nothing.
"""
