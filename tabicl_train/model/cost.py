"""What a table costs a TabICL: arithmetic and memory, counted from the configuration.

N rows of which n are labelled, M features, G feature groups, E embedding, I inducing points, T tokens of a row,
D row representation, C classes.
"""

from tabicl_train.model.config import SCALING_HIDDEN, TabICLConfig


def forward_flops(config: TabICLConfig, num_rows: int, train_size: int, num_features: int) -> float:
    """FLOPs of the matrix products of one table's forward pass, 2 per multiply-add."""
    N, n = num_rows, train_size
    return (
        column_flops(config, N, n, num_features)
        + row_flops(config, N, token_groups(config, num_features))
        + icl_flops(config, N, n)
    )


def token_groups(config: TabICLConfig, num_features: int) -> int:
    """G: column tokens of a row."""
    return -(-num_features // config.group_size) if config.col_grouping == "disjoint" else num_features


def pack_tokens(config: TabICLConfig, num_rows: int, num_features: int) -> int:
    """What a table counts against the token budget of a pack.

    Its tokens in the row stage, and for each row as many more as keep as much memory as the row does in in-context
    learning: icl_num_blocks blocks of width D, where a token passes col_num_blocks + row_num_blocks of width E.
    """
    c = config
    of_row = round(c.icl_num_blocks * c.row_num_cls / (c.col_num_blocks + c.row_num_blocks))
    return num_rows * (token_groups(config, num_features) + c.row_num_cls + of_row)


def block_flops(config: TabICLConfig, width: int, queries: float, keys: float) -> float:
    """A transformer block: projections of queries, keys and values, attention, and the feed-forward network."""
    per_query = 2 * width * width * (2 + 2 * config.ff_factor)  # query and output projections, two linear layers
    per_key = 2 * width * 2 * width
    return queries * per_query + keys * per_key + 4 * queries * keys * width


def gate_flops(scaling: str, width: int, heads: int, queries: float) -> float:
    """The query-dependent gate of the scalable softmax; the cost of what depends only on log n is negligible."""
    if not scaling.startswith("qassmax"):
        return 0.0
    outputs = width if scaling.endswith("_elementwise") else heads
    return 2 * queries * heads * SCALING_HIDDEN * (width / heads + outputs / heads)


def column_flops(config: TabICLConfig, N: int, n: int, num_features: int) -> float:
    E, inducing, G = config.embed_dim, config.col_num_inducing, token_groups(config, num_features)
    # The inducing vectors are the same for all columns: projected and rescaled once per forward pass, not counted.
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


def kept_values(config: TabICLConfig, num_rows: int, train_size: int, num_features: int) -> float:
    """Values of one table in memory at the start of the backward pass.

    A block keeps 8 + 2 ff_factor vectors of its width per token: inputs and outputs of both LayerNorms, query, key,
    value, the output of attention, and the hidden layer of the feed-forward network before and after its activation.
    Rotary embedding keeps two more; the gate of the scalable softmax keeps four more and its hidden layer twice per
    head. Blocks whose activations are recomputed keep only their input. The gradients of one block come on top.
    """
    N, n = num_rows, train_size
    E, D, cls = config.embed_dim, config.row_dim, config.row_num_cls
    G = token_groups(config, num_features)
    T = G + cls
    block = 8 + 2 * config.ff_factor
    gate = 0.0
    if config.icl_scaling.startswith("qassmax"):
        gate = 4 + 2 * SCALING_HIDDEN * config.icl_num_heads / D
    column = G * E * (N * (block - 2) + 3 * n + config.col_num_inducing * block)
    row = N * T * E * (block + 2)
    last_row = N * E * (3 * T + block * cls)
    icl = N * D * (block + gate)
    last_icl = D * ((N - n) * (block + gate) + 3 * n)
    blocks = config.col_num_blocks, config.row_num_blocks - 1, config.icl_num_blocks - 1
    if 0 < config.checkpoint_rows < N:
        inputs = blocks[0] * G * N * E + (blocks[1] + 1) * N * T * E + (blocks[2] + 1) * N * D
        return inputs + 3 * max(column, row, last_row, icl, last_icl)  # computed twice, and gradients; measured
    kept = blocks[0] * column + blocks[1] * row + last_row + blocks[2] * icl + last_icl
    return kept + max(column, row, last_row, icl, last_icl)
