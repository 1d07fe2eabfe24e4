"""Memory of a training step, estimated from the configuration before a run starts.

Peak = weights, gradients, their sum and optimizer state (20 bytes per parameter), plus what the forward pass of the
largest micro-batch keeps for the backward pass (`Network.kept_values`).

The estimate was 0.79 to 1.13 times the measured growth of the resident set (CPU; tests/planning/test_memory.py) at nine
shapes, one of them bf16, and 0.9 and 1.3 times with recomputed activations.
"""

from __future__ import annotations

from dataclasses import replace

from tabicl_train.config.schema import StageConfig
from tabicl_train.curriculum import FEATURE_CAPS, cap_features
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.families import family_of

STATE_BYTES = 20  # per parameter: weight, gradient of a micro-batch and of the step, Adam's two moments; Muon has one
VALUE_BYTES = {"fp32": 4, "bf16": 3, "fp16": 3}  # per value kept; under autocast residuals, norms and gates stay fp32


def peak_bytes(
    config: TabICLConfig,
    parameters: int,
    tables: int,
    num_rows: int,
    train_size: int,
    num_features: int,
    precision: str = "fp32",
) -> float:
    """Bytes at the peak of an optimizer step whose largest micro-batch has these tables."""
    values = tables * family_of(config).kept_values(config, num_rows, train_size, num_features)
    return STATE_BYTES * parameters + VALUE_BYTES[precision] * values


def stage_peak(config: TabICLConfig, parameters: int, stage: StageConfig, precision: str) -> float:
    """peak_bytes of the largest micro-batch that a stage can draw."""
    if stage.checkpoint_rows is not None:
        config = replace(config, checkpoint_rows=stage.checkpoint_rows)
    low, high = stage.rows
    if stage.small_share > 0:
        low, high = min(low, stage.small_rows[0]), max(high, stage.small_rows[1])
    limits = [config.checkpoint_rows, *(rows for rows, _ in FEATURE_CAPS), *fullest_rows(stage)]
    peaks = []
    for rows in {low, high, *(rows for rows in limits if low <= rows <= high)}:
        tables = min(stage.group_size, max(stage.micro_batch_rows // rows, 1))
        labelled = round(rows * stage.train_share[1])
        features = cap_features(rows, stage.features[1])
        peaks.append(peak_bytes(config, parameters, tables, rows, labelled, features, precision))
    return max(peaks)


def fullest_rows(stage: StageConfig) -> list[int]:
    """For each number of tables, the most rows with which they fit the row budget of a micro-batch."""
    return [stage.micro_batch_rows // tables for tables in range(1, stage.group_size + 1)]
