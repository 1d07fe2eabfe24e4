"""The figure of tabicl-lab entropy, of measures that no network has: each is a known function of layer, head and n."""

import pandas as pd
import pytest

from tabicl_train.lab.entropy_figure import draw_attention

KINDS = (("column", "inducing points", 1), ("icl", "labeled rows", 2), ("icl", "query rows", 3))  # layers of each


def attention_measures(gate: bool = True) -> pd.DataFrame:
    """As lab/instruments.py writes them: two tables for n = 100 and 1,000, two heads.

    entropy = 0.1 * (layer + 1) + 0.02 * (head + table), base_largest = log10(n)
    """
    rows = [
        {
            "table": table, "stage": stage, "layer": layer, "queries": kind, "head": head, "n": n, "measured": 8,
            "entropy": 0.1 * (layer + 1) + 0.02 * (head + table), "top_weight": 10 / n, 
            "gap_mean": 3.0, "base_largest": len(str(n)) - 1.0, "gate_mean": 1.0 if gate else None,
        }
        for table in (0, 1)
        for n in (100, 1000)
        for stage, kind, layers in KINDS
        for layer in range(layers)
        for head in (0, 1)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_attention_is_a_line_per_layer_and_a_band_over_heads():
    grid = draw_attention(attention_measures()).axes
    assert len(grid) == 15
    assert len(draw_attention(attention_measures(gate=False)).axes) == 12
    for axes, layers in zip(grid[:3], (1, 2, 3), strict=True):
        lines = axes.get_lines()
        assert len(lines) == len(axes.collections) == layers
        for layer, (line, band) in enumerate(zip(lines, axes.collections, strict=True)):
            mean = 0.1 * (layer + 1) + 0.02  # over two heads and two tables
            assert line.get_xydata().tolist() == [[100, pytest.approx(mean)], [1000, pytest.approx(mean)]]
            low, high = band.get_paths()[0].get_extents().get_points()[:, 1]
            assert (low, high) == (pytest.approx(mean - 0.01), pytest.approx(mean + 0.01))  # means over tables
    labeled, queries = ([line.get_color() for line in axes.get_lines()] for axes in grid[1:3])
    assert [*labeled, queries[-1]] == queries and len(set(queries)) == 3  # a layer has one color
    assert [line.get_ydata().tolist() for line in grid[9].get_lines()] == [[2, 3]]
