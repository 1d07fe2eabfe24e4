"""Predicted times from counted operations: each operator is bound by arithmetic, by memory, or by its launches.

The counts are those of tests/fake_cuda/costs.json. Rates that have not been measured are guesses about an H200.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

COSTS = Path(__file__).resolve().parents[2] / "fake_cuda" / "costs.json"
RATES = {
    "bytes": 3.6e12,  # per second, of 4.8e12 by the data sheet
    "half": 5.0e14,  # FLOP per second of products in bf16, of 9.9e14; most are thin
    "fp32": 4.5e13,
    "launch": 2.2e-6,  # seconds of the shortest kernel
}
# FLOP per second of attention in bf16, guesses too: with narrow heads most of the time goes to exponentials, and rows
# fill their tiles of 32 to 128 tokens by half.
ATTENTION = {"column": 9.5e13, "row": 3.0e13, "icl": 2.7e14}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def predicted(case: str, rates: dict[str, float], tokens: int | None = None) -> dict[str, float]:
    """Seconds by part of a counted step, or of one with other tables, scaled by their tokens."""
    rates = {**RATES, **rates}
    content = json.loads(COSTS.read_text())[case]
    scale = 1.0 if tokens is None else tokens / content["tokens"]
    parts: dict[str, float] = defaultdict(float)
    for part, operator, _, launches, flops, moved in content["operators"]:
        name = operator.split(".")[1]
        arithmetic = 0.0
        if "attention" in name or "attend" in name:
            arithmetic = flops / ATTENTION.get(part, ATTENTION["icl"])
        elif name in PRODUCTS:
            arithmetic = flops / rates["fp32" if part == "optimizer" else "half"]
        work = max(arithmetic, moved / rates["bytes"])
        parts[part] += max(work if part in ("gradients", "optimizer") else work * scale, launches * rates["launch"])
    return dict(parts)
