"""Memory of a training step, estimated from the configuration: what a run needs is told before it starts.

Peak = weights, gradients, their sum and optimiser state (20 bytes a parameter), and of the largest micro-batch what the
forward pass keeps for the backward pass, and a block more, whose gradients are under way.

A block keeps of every token 8 + 2 ff_factor vectors of its width: the inputs of both LayerNorms and their outputs,
query, key, value, the attention's output, and the feed-forward network's hidden layer before and after its activation.
Rotary embedding keeps two more, and the gate of the scalable softmax four, and its hidden layer twice a head. Blocks
that are computed again in the backward pass keep their input alone.

Beside the measured growth of the resident set (CPU; tests/test_memory.py) the estimate was 0.79 to 1.13 of it at
nine shapes, one of them bf16, and 0.9 and 1.3 with activations computed again.

B tables, N rows of which n are labelled, G feature groups, T tokens of a row, E embedding, D row representation.
"""

from __future__ import annotations

from dataclasses import replace

from tabicl_train.config.schema import StageConfig
from tabicl_train.curriculum import FEATURE_CAPS, cap_features
from tabicl_train.model.config import TabICLConfig
from tabicl_train.planning.flops import GATE_HIDDEN, token_groups

STATE_BYTES = 20  # a parameter: weight, gradient of a micro-batch and of the step, Adam's two moments; Muon has one
VALUE_BYTES = {"fp32": 4, "bf16": 3, "fp16": 3}  # a kept value; under autocast residuals, norms and gates stay fp32


def peak_bytes(
    config: TabICLConfig,
    parameters: int,
    tables: int,
    num_rows: int,
    train_size: int,
    num_features: int,
    precision: str = "fp32",
) -> float:
    """Bytes at the peak of an optimiser step whose largest micro-batch is this."""
    values = tables * kept_values(config, num_rows, train_size, num_features)
    return STATE_BYTES * parameters + VALUE_BYTES[precision] * values


def kept_values(config: TabICLConfig, N: int, n: int, num_features: int) -> float:
    """Values of one table that are alive at the start of the backward pass."""
    E, D, cls = config.embed_dim, config.row_dim, config.row_num_cls
    G = token_groups(config, num_features)
    T = G + cls
    block = 8 + 2 * config.ff_factor
    gate = 0.0
    if config.icl_scaling.startswith("qassmax"):
        gate = 4 + 2 * GATE_HIDDEN * config.icl_num_heads / D
    column = G * E * (N * (block - 2) + 3 * n + config.col_num_inducing * block)
    row = N * T * E * (block + 2)
    last_row = N * E * (3 * T + block * cls)
    icl = N * D * (block + gate)
    last_icl = D * ((N - n) * (block + gate) + 3 * n)
    blocks = config.col_num_blocks, config.row_num_blocks - 1, config.icl_num_blocks - 1
    if 0 < config.checkpoint_rows < N:
        inputs = blocks[0] * G * N * E + (blocks[1] + 1) * N * T * E + (blocks[2] + 1) * N * D
        return inputs + 3 * max(column, row, last_row, icl, last_icl)  # computed twice, and the gradients; measured
    kept = blocks[0] * column + blocks[1] * row + last_row + blocks[2] * icl + last_icl
    return kept + max(column, row, last_row, icl, last_icl)


def stage_peak(config: TabICLConfig, parameters: int, stage: StageConfig, precision: str) -> float:
    """peak_bytes of the largest micro-batch that a stage can draw."""
    if stage.checkpoint_rows is not None:
        config = replace(config, checkpoint_rows=stage.checkpoint_rows)
    low, high = stage.rows
    if stage.small_share > 0:
        low, high = min(low, stage.small_rows[0]), max(high, stage.small_rows[1])
    limits = [config.checkpoint_rows, *(rows for rows, _ in FEATURE_CAPS), *fullest_rows(stage)]
    found = []
    for rows in {low, high, *(rows for rows in limits if low <= rows <= high)}:
        tables = min(stage.group_size, max(stage.micro_batch_rows // rows, 1))
        labelled = round(rows * stage.train_share[1])
        features = cap_features(rows, stage.features[1])
        found.append(peak_bytes(config, parameters, tables, rows, labelled, features, precision))
    return max(found)


def fullest_rows(stage: StageConfig) -> list[int]:
    """The most rows with which each number of tables fits the row budget."""
    return [stage.micro_batch_rows // tables for tables in range(1, stage.group_size + 1)]
