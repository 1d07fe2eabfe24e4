r"""The figure of the README: mean ROC AUC on real tasks against training time, from configs/experiment/ladder.csv.

    python tests/benchmarks/draw_ladder.py [output=configs/experiment/ladder.png]

A row of the table is a trained network: its family, recipe, seed, minutes of training on two CPU cores, and mean ROC
AUC over the 75 tasks of suite=rdatasets and the 22 of suite=keel (three splits), empty if it was not scored there. The
baselines' scores are those stored with the suites. The trainer of the tabicl package, with a network of the shape of
demo_long, was run in the same minutes as follows; the learning rate is the best of 4e-4, 1.5e-3 and 4e-3 after 150
steps:

    python -m tabicl.train --device cpu --prior_device cpu --amp False --muon True --lr 4e-3 \
        --scheduler cosine_warmup --warmup_proportion 0.05 --gradient_clipping 1.0 --max_steps 800 --batch_size 16 \
        --micro_batch_size 16 --batch_size_per_gp 4 --min_features 2 --max_features 12 --max_classes 10 \
        --min_seq_len 60 --max_seq_len 200 --prior_type mix_scm --n_jobs 1 --embed_dim 48 --col_num_blocks 1 \
        --col_nhead 4 --col_num_inds 16 --row_num_blocks 1 --row_nhead 4 --row_num_cls 2 --icl_num_blocks 3 \
        --icl_nhead 4 --col_target_aware True --col_ssmax True --icl_ssmax True --wandb_log False \
        --checkpoint_dir peer --save_temp_every 800
"""

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from tabicl_train.config.compose import CONFIG_DIR
from tabicl_train.evaluation.suites import STORED_SCORES

FOLDER = CONFIG_DIR / "experiment"
OWN = "tabicl-train"
COLORS = {OWN: "C0", "nanoTabPFN": "C1", "tabicl": "C2"}
# Title and floor of each panel. Scores below the floor are drawn there, with their values.
PANELS = {"rdatasets": ("75 tables of Rdatasets", 0.7), "keel": ("22 tables of KEEL", 0.81)}
HEIGHT = 0.09  # range of ROC AUC in all panels, so that distances can be compared


def draw(networks: pd.DataFrame, baselines: dict[str, pd.Series]) -> Figure:
    """Draw a panel for each suite.

    Parameters
    ----------
    networks : DataFrame
        Columns family, recipe, minutes, and one for each suite.
    baselines : dict of str to Series
        Scores by suite and name.

    Returns
    -------
    Figure
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for ax, (suite, (title, floor)) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        ax.set_title(title)
        draw_panel(ax, networks.rename(columns={suite: "score"}).dropna(subset="score"), baselines[suite], floor)
    return figure


def draw_panel(ax: Axes, networks: pd.DataFrame, baselines: pd.Series, floor: float) -> None:
    # A point for each recipe, the mean over its seeds with a band; recipes of a family are in order of time.
    ax.set_ylim(floor, floor + HEIGHT)
    for family, rows in networks.groupby("family", sort=False):
        points = rows.groupby("recipe").agg(
            minutes=("minutes", "median"), mean=("score", "mean"), low=("score", "min"), high=("score", "max")
        )
        points = points.sort_values("minutes")
        color = COLORS[family]
        ax.fill_between(points.minutes, points.low, points.high, alpha=0.2, color=color)
        seen = points["mean"].clip(lower=floor + 0.002)
        ax.plot(points.minutes, seen, "-" if family == OWN else "", marker="o", color=color, zorder=3)
        for recipe, minutes, score in zip(points.index, points.minutes, points["mean"], strict=True):
            below = score < floor
            text = f"{recipe} {score:.3f}" + (" (below)" if below else "")
            place = (4, -13) if family == OWN else (8, -3)
            align = "left"
            if minutes > 60:  # the label would leave the panel
                place, align = (6, 12), "right"
            if recipe == "mini":  # below the line to medium
                place, align = (2, -14), "center"
            ax.annotate(
                text, (minutes, max(score, floor + 0.002)), place, textcoords="offset points", color=color,
                ha=align, fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip

    # A dotted line for each baseline, with labels that do not overlap.
    lowest = floor
    for name, score in baselines.sort_values().items():
        ax.axhline(score, color="gray", linestyle=":", linewidth=1)
        lowest = max(score, lowest + 0.0036)  # the height of a label
        ax.annotate(f"{name} {score:.3f}", (1, lowest), (4, 0), ("axes fraction", "data"), "offset points",
                    va="center", fontsize=8, color="dimgray")  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(3, 330)
    ax.set_xticks([5, 10, 30, 60, 120, 240])
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("minutes of training on two CPU cores")
    ax.set_ylabel("mean ROC AUC")


if __name__ == "__main__":
    args = dict(argument.split("=", 1) for argument in sys.argv[1:])
    stored = {suite: pd.read_csv(STORED_SCORES[suite][0], comment="#") for suite in PANELS}
    means = {suite: scores.groupby("method").roc_auc.mean() for suite, scores in stored.items()}
    figure = draw(pd.read_csv(FOLDER / "ladder.csv", comment="#"), means)
    figure.savefig(args.get("output", FOLDER / "ladder.png"), dpi=120)
