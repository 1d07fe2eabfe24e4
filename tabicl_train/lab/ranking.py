"""ranking: scalar scaling of a query keeps the order of keys, element-wise scaling can reverse it, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from omegaconf import MISSING

from tabicl_train.lab.fading import SCALE
from tabicl_train.lab.folder import Folder, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A query with two elements, and two keys that each match one of them. The divisor sqrt(2) is left out.
FIRST, SECOND = 4.0, 3.0  # the elements of the query, which are the scores of the two keys
GROWTH = 0.1, SCALE  # per log n: multipliers of the two elements under the element-wise rule
START = 1.0  # the element-wise multiplier of the first element at n = 1
POWERS = (1, 10, 100, 1000)  # exponents n of (1 + x / n)^n

QUESTION = """
A query may be rescaled before it meets the keys. One positive number for the whole query changes how decided attention
is, but not which key comes first. A number for each element of the query can turn it to another key. Here a query (4,
3) meets a key (1, 0), a key (0, 1) and n - 2 keys (0, 0). SSMax multiplies both elements by s log n. The element-wise
rule multiplies the first by 1 + 0.1 log n and the second by s log n, as MLPs of log n may learn. Which key wins?
"""


@dataclass
class Options:
    """tabicl-lab ranking folder=DIR

    Two keys under scalar and element-wise scaling of the query, for n from 10 to a million, in closed form.
    """

    folder: str = MISSING
    """Folder to write."""
    small: bool = False
    """Fewer values of n."""


def run(options: Options) -> None:
    folder = Folder("ranking", options)
    frame = curves(6 if options.small else 51)
    folder.csv("ranking", frame)
    folder.figure("ranking", draw(frame))
    folder.page("Scaling and the ranking of keys", QUESTION, findings(frame))


def multipliers(n: np.ndarray) -> dict[str, np.ndarray]:
    """Return the factors of the two elements of the query under each rule, (n, 2)."""
    log_n = np.log(n)
    ones = np.ones_like(log_n)
    slow, fast = GROWTH
    return {
        "softmax": np.stack([ones, ones], 1),
        "SSMax": np.stack([SCALE * log_n, SCALE * log_n], 1),
        "element-wise": np.stack([START + slow * log_n, fast * log_n], 1),
    }


def weights(n: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the softmax weights of both keys among n, of which the others have the score 0, (n, 2)."""
    odds = np.exp(factors * np.array([FIRST, SECOND]))
    return odds / (odds.sum(1, keepdims=True) + n[:, None] - 2)


def crossing() -> float:
    """Return the n from which on the element-wise rule prefers the second key."""
    # FIRST * (START + slow * log n) = SECOND * fast * log n
    slow, fast = GROWTH
    return math.exp(FIRST * START / (SECOND * fast - FIRST * slow))


def curves(count: int) -> pd.DataFrame:
    """Return a row for each rule and n: rule, n, first and second (the weights of both keys)."""
    n = np.unique(np.geomspace(10, 1e6, count).round())
    frames = []
    for rule, factors in multipliers(n).items():
        both = weights(n, factors)
        frames.append(pd.DataFrame({"rule": rule, "n": n.astype(int), "first": both[:, 0], "second": both[:, 1]}))
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    rules = frame["rule"].unique()
    for axes, rule in zip(figure.subplots(1, len(rules), sharey=True), rules, strict=True):
        rows = frame[frame["rule"] == rule]
        axes.plot(rows["n"], rows["first"], label="key (1, 0)")
        axes.plot(rows["n"], rows["second"], "--", label="key (0, 1)")
        if rule == "element-wise":
            axes.axvline(crossing(), color="0.5", linestyle=":")
        axes.set(title=rule, xscale="log", xlabel="keys n", ylim=(-0.02, 1.02))
    figure.axes[0].set_ylabel("weight")
    figure.axes[0].legend()
    return figure


def findings(frame: pd.DataFrame) -> str:
    shown = frame[frame["n"].isin([10**power for power in range(1, 7)])]
    first = shown["first"].map("{:.4f}".format)
    second = shown["second"].map("{:.4f}".format)
    table = shown[["rule", "n"]].assign(**{"key (1, 0)": first, "key (0, 1)": second})
    limits = []
    for power in POWERS:
        x = np.linspace(-2, 2, 401)
        # The odds of SSA with b = 1 / p: (1 + |z| / p)^(sgn(z) p)
        odds = (1 + np.abs(x) / power) ** (np.sign(x) * power)
        limits.append((power, f"{np.max(np.abs(odds / np.exp(x) - 1)):.2g}"))
    return f"""
![weights of two keys by number of keys](ranking.png)

{markdown(table)}

- **softmax** and **SSMax** multiply all scores by one positive number. The key (1, 0) has the larger score, so it has
  the larger weight for every n; only how much larger it is changes.
- The **element-wise** rule multiplies the scores {FIRST:g} and {SECOND:g} by different numbers. They are equal where
  {FIRST:g} ({START:g} + {GROWTH[0]:g} log n) = {SECOND:g} * {GROWTH[1]:g} log n, at n = {crossing():,.0f} (dotted).
  From there on the other key wins. The query points elsewhere in a long table than in a short one.

Whether that helps depends on what was learned; where n exceeds the lengths of training, nothing was learned about it.

## Signed averaging and softmax

With b = 1 / p, SSA weighs a score z by (1 + |z| / p)^(sgn(z) p), which tends to exp(z) as p grows. The largest relative
difference for scores from -2 to 2:

{markdown(pd.DataFrame(limits, columns=["p", "difference"]))}

These are formulas: there are no seeds, and no intervals.
"""
