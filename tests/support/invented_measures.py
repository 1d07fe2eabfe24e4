"""Measures of attention that no network has: each is a known function of layer, head and n."""

import pandas as pd

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
