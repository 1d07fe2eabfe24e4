"""Matrix arithmetic of a forward pass, counted from the configuration: 2 FLOPs a multiply-add.

N rows of which n are labelled, M features, G feature groups, E embedding, I inducing points, T tokens of a row,
D row representation, C classes.
"""

from __future__ import annotations

import torch

from tabicl_train.model.config import TabICLConfig

# 10^12 FLOPs a second of dense matrix products at most, as the makers tell: 16-bit formats, fp32 without TF32
PEAK_TFLOPS = {"H200": (989, 67), "H100": (989, 67), "A100": (312, 19.5), "L40S": (362, 91.6), "4090": (165, 82.6)}
GATE_HIDDEN = 64  # width of the scalable softmax's small networks


def forward_flops(config: TabICLConfig, num_rows: int, train_size: int, num_features: int) -> float:
    """FLOPs of one table's forward pass; the backward pass takes twice as many."""
    N, n = num_rows, train_size
    return (
        column_flops(config, N, n, num_features)
        + row_flops(config, N, token_groups(config, num_features))
        + icl_flops(config, N, n)
    )


def token_groups(config: TabICLConfig, num_features: int) -> int:
    """G: column tokens of a row."""
    return -(-num_features // config.group_size) if config.col_grouping == "disjoint" else num_features


def block_flops(config: TabICLConfig, width: int, queries: float, keys: float) -> float:
    """A transformer block: projections of queries, keys and values, attention, and the feed-forward network."""
    per_query = 2 * width * width * (2 + 2 * config.ff_factor)  # query and output projections, two linear layers
    per_key = 2 * width * 2 * width
    return queries * per_query + keys * per_key + 4 * queries * keys * width


def gate_flops(scaling: str, width: int, heads: int, queries: float) -> float:
    """The query-dependent gate; what depends on log n alone is nothing beside it."""
    if not scaling.startswith("qassmax"):
        return 0.0
    outputs = width if scaling.endswith("_elementwise") else heads
    return 2 * queries * heads * GATE_HIDDEN * (width / heads + outputs / heads)


def column_flops(config: TabICLConfig, N: int, n: int, num_features: int) -> float:
    E, inducing, G = config.embed_dim, config.col_num_inducing, token_groups(config, num_features)
    # The inducing vectors are the same for all columns: projected and rescaled once a forward pass, not counted.
    block = block_flops(config, E, inducing, n) - 2 * E * E * inducing + block_flops(config, E, N, inducing)
    affine = 4 * E * E * N if config.col_affine else 0
    return G * (2 * N * config.group_size * E + config.col_num_blocks * block + affine)


def row_flops(config: TabICLConfig, N: int, G: int) -> float:
    T, E, cls = G + config.row_num_cls, config.embed_dim, config.row_num_cls
    return N * ((config.row_num_blocks - 1) * block_flops(config, E, T, T) + block_flops(config, E, cls, T))


def icl_flops(config: TabICLConfig, N: int, n: int) -> float:
    D, queries = config.row_dim, N - n
    scaling, heads = config.icl_scaling, config.icl_num_heads
    inner = block_flops(config, D, N, n) + gate_flops(scaling, D, heads, N)
    last = block_flops(config, D, queries, n) + gate_flops(scaling, D, heads, queries)  # query rows only
    decoder = 2 * queries * (D * 2 * D + 2 * D * config.max_classes)
    labels = 2 * n * config.max_classes * D
    return (config.icl_num_blocks - 1) * inner + last + decoder + labels


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOPs a second that a device can do at most, where that is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((peaks for part, peaks in PEAK_TFLOPS.items() if part in name), None)
    return None if found is None else found[precision == "fp32"] * 1e12
