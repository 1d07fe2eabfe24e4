"""The figures of the page Concepts that no command of the project draws, from the tables of experiment=demo.

    python launch/docs/draw_concepts.py [output=launch/docs/figures]

writes address.png and pack.png.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from priors import Table, build_prior
from tabicl_train import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.stream.steps import draw_table

SEED = 0
ADDRESS = 3, 2  # the step and the table that are outlined
STEPS = 6
LONG = 2100  # a step of the stage of long tables


def tables_of(config: RunConfig, step: int) -> list[Table]:
    """Draw the tables of a step as a run does, in the order of their numbers."""
    prior = build_prior(**config.prior)
    plan = plan_step(config.curriculum, config.model, SEED, step)
    specs = {number: group.spec for group in plan.groups for number in group.tables}
    return [draw_table(prior, specs[number], SEED, step, number) for number in sorted(specs)]


def draw_address(config: RunConfig) -> Figure:
    """Tables of some steps, each at its address: values as colors, labels on the left, query rows at the bottom."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    steps = [tables_of(config, step) for step in range(STEPS)]
    axes = figure.subplots(len(steps[0]), STEPS)
    for step, tables in enumerate(steps):
        for number, table in enumerate(tables):
            ax = axes[number, step]
            draw_cells(ax, table)
            if number == 0:
                ax.set_title(f"step {step}", fontsize=10)
            if step == 0:
                ax.set_ylabel(f"table {number}", fontsize=10)
            if (step, number) == ADDRESS:
                for spine in ax.spines.values():
                    spine.set(color="C3", linewidth=3)
                ax.set_xlabel(f"address ({SEED}, {step}, {number})", color="C3", fontsize=9)
    figure.suptitle(f"seed {SEED}: rows down, features across; query rows are faded, their labels hidden", fontsize=10)
    return figure


def draw_cells(ax: Axes, table: Table) -> None:
    """Draw a table as an image, at a scale that all tables share."""
    N, M = table.X.shape
    labels = np.where(np.arange(N) < table.train_size, table.y.numpy(), np.nan)
    # The image is as wide as the widest table of the stage (12 features), and as high as the longest one (200 rows).
    ax.imshow(table.X.numpy(), cmap="coolwarm", vmin=-2.5, vmax=2.5, aspect="auto", extent=(0, M, N, 0))
    ax.imshow(labels[:, None], cmap="tab10", vmin=0, vmax=9, aspect="auto", extent=(-2, -0.6, N, 0))
    ax.add_patch(Rectangle((0, table.train_size), M, N - table.train_size, color="white", alpha=0.55))
    ax.set(xlim=(-2.4, 12.4), ylim=(205, -5), xticks=[], yticks=[])


def draw_pack(config: RunConfig) -> Figure:
    """The tables of one step of the long stage as a padded batch, and as a pack."""
    plan = plan_step(config.curriculum, config.model, SEED, LONG)
    specs = [group.spec for group in plan.groups for _ in group.tables]
    sizes = [(spec.num_rows, spec.num_features) for spec in specs]
    rows, features = max(N for N, _ in sizes), max(M for _, M in sizes)
    cells = sum(N * M for N, M in sizes)
    padded = len(sizes) * rows * features

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, len(sizes), height_ratios=[3, 0.7])
    for number, (N, M) in enumerate(sizes):
        ax = figure.add_subplot(grid[0, number])
        ax.add_patch(Rectangle((0, 0), features, rows, facecolor="0.9", edgecolor="0.6", hatch="//"))
        ax.add_patch(Rectangle((0, 0), M, N, color=f"C{number}"))
        ax.set(xlim=(-0.5, features + 0.5), ylim=(rows * 1.01, -rows * 0.01), xticks=[], yticks=[])
        ax.set_title(f"{N:,} rows, {M} features", fontsize=9)
        if number == 0:
            ax.set_ylabel(f"padded batch\n{padded:,} cells", fontsize=9)
    ax = figure.add_subplot(grid[1, :])
    left = 0
    for number, (N, M) in enumerate(sizes):
        ax.barh(0, N * M, left=left, color=f"C{number}", height=1)
        left += N * M
    ax.barh(0, padded - cells, left=cells, facecolor="0.9", edgecolor="0.6", hatch="//", height=1)
    ax.set(xlim=(0, padded), ylim=(-0.5, 0.5), yticks=[], xlabel="cells, one table after the other")
    ax.set_ylabel(f"pack\n{cells:,} cells", fontsize=9)
    ax.text((cells + padded) / 2, 0, "not computed", ha="center", va="center", backgroundcolor="white", fontsize=9)
    return figure


def main() -> None:
    """Write the figures."""
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    output = Path(arguments.get("output", Path(__file__).parent / "figures"))
    output.mkdir(parents=True, exist_ok=True)
    config = compose(["experiment=demo"])
    draw_address(config).savefig(output / "address.png", dpi=100)
    draw_pack(config).savefig(output / "pack.png", dpi=100)


if __name__ == "__main__":
    main()
