"""What a table costs in a TabICL: FLOPs and values kept for the backward pass, counted from the configuration.

N rows, of which n are labeled, M features, G feature groups, E embedding, T tokens of a row, D row representation.
"""

from __future__ import annotations

from tabicl_train.doors import register
from tabicl_train.model.attention import FLASH_BACKWARD
from tabicl_train.model.config import TabICLConfig


def token_groups(config: TabICLConfig, num_features: int) -> int:
    """Return G, the column tokens of a row."""
    if config.col_grouping == "disjoint":
        return -(-num_features // config.group_size)
    return num_features


def block_flops(config: TabICLConfig, width: int, queries: float, keys: float) -> float:
    """Count a transformer block: projections of queries, keys and values, attention, and the feed-forward network."""
    # Projections of a query and of the output, and both layers of the MLP; projections of a key and of its value.
    per_query = 2 * width * width * (2 + 2 * config.ff_factor)
    per_key = 2 * width * 2 * width
    return queries * per_query + keys * per_key + 4 * queries * keys * width


def column_flops(config: TabICLConfig, N: int, n: int, num_features: int) -> float:
    """Count the column stage of a table."""
    E = config.embed_dim
    inducing = config.col_num_inducing
    G = token_groups(config, num_features)
    # The inducing vectors are shared by all columns; projecting and scaling them once per pass is not counted.
    to_inducing = block_flops(config, E, inducing, n) - 2 * E * E * inducing
    block = to_inducing + block_flops(config, E, N, inducing)
    # Two linear layers, out_w and out_b.
    affine = 4 * E * E * N if config.col_affine else 0
    return G * (2 * N * config.group_size * E + config.col_num_blocks * block + affine)


def row_flops(config: TabICLConfig, N: int, G: int) -> float:
    """Count the row stage of a table."""
    E = config.embed_dim
    T = G + config.row_num_cls
    inner = block_flops(config, E, T, T)
    last = block_flops(config, E, config.row_num_cls, T)  # CLS tokens only
    return N * ((config.row_num_blocks - 1) * inner + last)


def icl_flops(config: TabICLConfig, N: int, n: int) -> float:
    """Count in-context learning of a table, with the gates of a scaling rule and the decoder."""
    D = config.row_dim
    queries = N - n
    gate = register.scaling[config.icl_scaling].flops(D, config.icl_num_heads)
    inner = block_flops(config, D, N, n) + N * gate
    last = block_flops(config, D, queries, n) + queries * gate  # query rows only
    decoder = 2 * queries * (D * 2 * D + 2 * D * config.outputs)
    labels = 2 * n * config.label_width * D
    return (config.icl_num_blocks - 1) * inner + last + decoder + labels


def inputs_of_token(config: TabICLConfig) -> int:
    """Count the numbers that a token of the column stage reads: cells, and the label and whether there is one."""
    labels = config.label_width + 1 if config.col_target_aware else 0
    return config.group_size + labels


def kept_by_part(
    config: TabICLConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
) -> dict[str, float]:
    """Count the values of one table that each part keeps for the backward pass; arguments as in `kept_values`.

    Values outside of blocks are always kept: the cells and labels that the column stage reads, the rows before their
    last norm, the values of the decoder and, for the loss, the quantiles. A recomputed block keeps only its input.
    """
    c = config
    N = num_rows
    n = train_size
    G = token_groups(config, num_features)
    E = c.embed_dim
    D = c.row_dim
    T = G + c.row_num_cls
    cells = inputs_of_token(c)

    # Outside of blocks. With col_affine, a token and the inputs of both norms; in in-context learning, a query row
    # before and after the last norm, and the decoder's hidden layer, of width 2 D, before and after GELU.
    outside = {
        "column": G * N * (cells + (3 * E if c.col_affine else 0)),
        "row": N * D,
        "icl": 6 * (N - n) * D + quantile_values(c, N - n),
    }

    # The input of each block; the last one of rows has CLS tokens, in total of width D, in addition to its context.
    if recomputed:
        return {
            "column": outside["column"] + c.col_num_blocks * G * N * E,
            "row": outside["row"] + (c.row_num_blocks * N * T * E + N * D),
            "icl": outside["icl"] + c.icl_num_blocks * N * D,
        }

    # All values of each block; the last one may compute fewer queries.
    num_blocks = {"column": c.col_num_blocks, "row": c.row_num_blocks, "icl": c.icl_num_blocks}
    kept = {}
    for part, (inner, last) in block_values(c, N, n, num_features).items():
        kept[part] = outside[part] + ((num_blocks[part] - 1) * inner + last)
    return kept


def quantile_values(config: TabICLConfig, queries: int) -> int:
    """Count the quantiles of the query rows; the few logits of a classifier are not counted."""
    return queries * config.num_quantiles if config.is_regression else 0


def block_values(
    config: TabICLConfig, num_rows: int, train_size: int, num_features: int
) -> dict[str, tuple[float, float]]:
    """Count the values of one table that a block of each part keeps, and those that its last block keeps.

    For each query a block keeps 6 + 2 ff_factor vectors of its width: inputs and outputs of both norms, the query, the
    output of attention, and the hidden layer of the MLP before and after its activation. For each key it keeps two
    vectors; on a GPU four if labeled and query rows attend to the same keys. Inducing points also keep the normalized
    labeled tokens that they read.
    """
    N = num_rows
    n = train_size
    E = config.embed_dim
    D = config.row_dim
    G = token_groups(config, num_features)
    T = G + config.row_num_cls
    query = 6 + 2 * config.ff_factor
    rotated_query = query + 4  # with rotated queries and keys
    icl_query = query + register.scaling[config.icl_scaling].kept(D, config.icl_num_heads)

    column = G * E * (query * N + 3 * n + (query + 4) * config.col_num_inducing)
    row = N * T * E * rotated_query
    last_row = N * E * (5 * T + query * config.row_num_cls)
    icl = D * (icl_query * N + 4 * n)
    last_icl = D * (icl_query * (N - n) + 4 * n)  # query rows only
    return {"column": (column, column), "row": (row, last_row), "icl": (icl, last_icl)}


def largest_block(config: TabICLConfig, num_rows: int, train_size: int, num_features: int) -> float:
    """Count the values that the largest block keeps."""
    return max(map(max, block_values(config, num_rows, train_size, num_features).values()))


def flash_workspace(config: TabICLConfig, num_rows: int, num_features: int) -> float:
    """Count the bytes in which the backward pass of flash attention sums gradients of the queries of a table's rows.

    The sums are float32, in heads of at least 32 values, with 128 more queries for each sequence. A launch has fewer
    than FLASH_BACKWARD of them; launches of several tables share the memory, but it is counted for each.
    """
    queries = num_rows * (token_groups(config, num_features) + config.row_num_cls + 128)
    width = config.row_num_heads * max(config.embed_dim // config.row_num_heads, 32)
    return 4.0 * min(queries * width, FLASH_BACKWARD)


def float32_values(
    config: TabICLConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
) -> float:
    """Count the kept values of one table that stay in float32 under autocast.

    These are

    - cells and labels,
    - about three vectors of each inducing point,
    - the factors of scaling rules,
    - with `col_attention_fp32`, the column attention: inputs, queries and outputs of tokens, and inputs, keys and
      values of labeled tokens; inducing points have both.

    Recomputed blocks keep only their inputs, which are not in float32.
    """
    c = config
    N = num_rows
    n = train_size
    G = token_groups(config, num_features)
    E = c.embed_dim
    D = c.row_dim
    cells = G * N * inputs_of_token(c)
    if recomputed:
        return cells
    column = G * E * 3 * c.col_num_inducing
    if c.col_attention_fp32:
        column += G * E * (3 * N + 3 * n + 6 * c.col_num_inducing)
    # The last block computes query rows only.
    factors = register.scaling[c.icl_scaling].kept(D, c.icl_num_heads)
    icl = D * factors * ((c.icl_num_blocks - 1) * N + (N - n))
    return cells + c.col_num_blocks * column + icl
