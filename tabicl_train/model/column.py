"""Stage 1, column embedding: cells become tokens that depend on their value and the distribution of their column.

Tokens of all tables lie one after another, see layout.Columns. B tables of N rows of which the first n are labeled, M
features, G feature groups, E embedding, I inducing points.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model.attention import Block, LayerNorm, run
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.kernels.linear import Linear, linear
from tabicl_train.model.layout import Columns, positions_by_kind, starts_of
from tabicl_train.model.pack import Pack, Shape


class LabelEncoder(Linear):
    """A linear map of the one-hot label, or of a number."""

    def forward(self, y: Tensor) -> Tensor:
        """y (rows,), int64 in [0, C) or float32 -> (rows, out_features)."""
        return super().forward(label_values(y, self.in_features).to(self.weight.dtype))


def label_values(y: Tensor, width: int) -> Tensor:
    """What is read of labels (rows,): of classes, int64, whether they are 0, 1, ..., as (rows, width); of numbers,
    float32, themselves, as (rows, 1)."""
    return y[:, None] if y.is_floating_point() else y[:, None] == torch.arange(width, device=y.device)


class InducedAttention(nn.Module):
    """Induced set attention (ISAB, arXiv 1810.00825): rows -> I inducing points -> rows, linear in the rows."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        rest = (c.dropout, c.bias_free_ln, c.zero_init, c.scaling_bound, c.col_attention_fp32, c.ssa_exponent)
        self.multihead_attn1 = Block(c.embed_dim, c.col_num_heads, c.ff_factor, c.col_scaling, *rest)
        # no scaling: its number of keys is always I
        self.multihead_attn2 = Block(c.embed_dim, c.col_num_heads, c.ff_factor, "none", *rest)
        self.ind_vectors = nn.Parameter(torch.empty(c.col_num_inducing, c.embed_dim))
        nn.init.trunc_normal_(self.ind_vectors, std=0.02)

    def forward(self, tokens: Tensor, columns: Columns, log_n: Tensor) -> Tensor:
        """tokens (tokens, E) of all columns -> (tokens, E). Inducing points see only labeled rows: nothing leaks."""
        labeled = tokens[: columns.labeled]
        hidden = self.multihead_attn1(self.ind_vectors, labeled, columns.to_inducing, log_n)  # (columns * I, E)
        return self.multihead_attn2(tokens, hidden, columns.from_inducing)


class ColumnEmbedding(nn.Module):
    """Groups of features -> set transformer over the rows of each group -> embeddings of cells."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        self.in_linear = Linear(c.group_size, c.embed_dim)
        if c.missing_values:  # zeros: the network begins as one that sees the mean of a standardized column
            self.missing_values = nn.Parameter(torch.zeros(c.embed_dim, c.group_size))
        self.tf_col = nn.ModuleDict({"blocks": nn.ModuleList(InducedAttention(c) for _ in range(c.col_num_blocks))})
        if c.col_target_aware:
            self.y_encoder = LabelEncoder(c.label_width, c.embed_dim)
        if c.col_affine:
            self.out_w, self.out_b = Linear(c.embed_dim, c.embed_dim), Linear(c.embed_dim, c.embed_dim)
            self.ln_w, self.ln_b = (LayerNorm(c.embed_dim, bias=not c.bias_free_ln) for _ in range(2))

    def forward(self, pack: Pack, columns: Columns, log_n: Tensor, recompute: bool = False) -> Tensor:
        """Embeddings of the cells of all tables, (tokens, E), in the order of `columns`; log_n (B,)."""
        cells = self.read(pack, columns, pack.y.index_select(0, columns.labels))
        return self.embed(cells, columns, log_n, recompute)

    def read(self, pack: Pack, columns: Columns, labels: Tensor) -> Tensor:
        """What each token knows of its cell, (tokens, K): the features of its group, which of them are missing if the
        network sees that, and, if it is target-aware, of a labeled row the label (see label_values) and a 1; 0
        otherwise. labels: (labeled tokens,)"""
        size, width = self.config.group_size, self.config.label_width
        index = feature_index(pack.sizes, pack.shapes, columns, self.config.col_grouping, size)  # (tokens, size)
        X = F.pad(pack.X, (0, max(N for N, _, _ in pack.shapes))) if self.config.col_grouping == "disjoint" else pack.X
        features = mark_missing(X[index]) if self.config.missing_values else X[index]
        if not self.config.col_target_aware:
            return features
        size = features.shape[1]
        cells = X.new_zeros(len(index), size + width + 1)
        cells[:, :size] = features
        cells[: columns.labeled, size:-1] = label_values(labels, width)
        cells[: columns.labeled, -1] = 1
        return cells

    def embed(self, cells: Tensor, columns: Columns, log_n: Tensor, recompute: bool = False) -> Tensor:
        """cells (tokens, K) -> (tokens, E), for any columns: they do not see each other."""
        weights = [self.in_linear.weight]
        if self.config.missing_values:
            weights.append(self.missing_values)
        if self.config.col_target_aware:
            weights += [self.y_encoder.weight, self.y_encoder.bias[:, None]]
        weight = torch.cat(weights, dim=1)  # one product for all of them, as passes over all tokens cost more
        tokens = linear(cells, weight, self.in_linear.bias)  # (tokens, E)
        for block in self.tf_col["blocks"].children():
            tokens = run(block, tokens, columns, log_n, recompute=recompute)
        if self.config.col_affine:
            tokens = cells[:, :1] * self.ln_w(self.out_w(tokens)) + self.ln_b(self.out_b(tokens))
        return tokens


def mark_missing(features: Tensor) -> Tensor:
    """features (..., size), NaN where missing -> (..., 2 size): 0 in place of NaN, and whether they are missing"""
    missing = features.isnan()
    return torch.cat([torch.where(missing, 0.0, features), missing.to(features.dtype)], -1)


def feature_index(sizes: Tensor, shapes: Iterable[Shape], columns: Columns, grouping: str, size: int) -> Tensor:
    """The cells that each token sees: positions in Pack.X, (tokens, size).

    none: one feature per token, G = M
    circular: token j sees features j + 1, j + 2, j + 4, ... modulo M, G = M
    disjoint: neighbors in groups of `size`, G = ceil(M / size); the cells that the last group lacks follow X
    """
    N, n, M = sizes.unbind(1)
    first = starts_of(N * M)[columns.table, None]  # (columns, 1), first cell of the table
    N, n, M = (values[columns.table] for values in (N, n, M))
    number = torch.arange(size, device=sizes.device)
    if grouping == "circular":
        features = (columns.group[:, None] + 2**number) % M[:, None]  # (columns, size)
    else:
        features = columns.group[:, None] * size + number
    start = first + features * N[:, None]
    if grouping == "disjoint":
        start = torch.where(features < M[:, None], start, sum(N * M for N, _, M in shapes))
    return positions_by_kind(start, 1, N, n, columns.from_inducing.queries, columns.labeled)
