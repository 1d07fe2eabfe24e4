"""Stage 1, column embedding: cells become tokens that depend on their value and the distribution of their column.

B tables, N rows of which the first n are labelled, M features, G feature groups, E embedding, I inducing points,
C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model.attention import Block, run
from tabicl_train.model.config import TabICLConfig


class LabelEncoder(nn.Linear):
    """A linear map of the one-hot label."""

    def forward(self, y: Tensor) -> Tensor:
        """y (B, n) int64 in [0, C) -> (B, n, out_features)."""
        one_hot = y.unsqueeze(-1) == torch.arange(self.in_features, device=y.device)
        return super().forward(one_hot.to(self.weight.dtype))


class InducedAttention(nn.Module):
    """Induced set attention (ISAB, arXiv 1810.00825): rows -> I inducing points -> rows, linear in the rows."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        rest = (c.dropout, c.bias_free_ln, c.zero_init, c.scaling_bound, c.col_attention_fp32)
        self.multihead_attn1 = Block(c.embed_dim, c.col_num_heads, c.ff_factor, c.col_scaling, *rest)
        # no scaling: its number of keys is always I
        self.multihead_attn2 = Block(c.embed_dim, c.col_num_heads, c.ff_factor, "none", *rest)
        self.ind_vectors = nn.Parameter(torch.empty(c.col_num_inducing, c.embed_dim))
        nn.init.trunc_normal_(self.ind_vectors, std=0.02)

    def forward(self, tokens: Tensor, train_size: int, log_n: Tensor) -> Tensor:
        """tokens (B*G, N, E) -> (B*G, N, E). Inducing points see only labelled rows, so queries leak nothing."""
        hidden = self.multihead_attn1(self.ind_vectors[None], tokens[:, :train_size], log_n=log_n)  # (B*G, I, E)
        return self.multihead_attn2(tokens, hidden)


class ColumnEmbedding(nn.Module):
    """Groups of features -> set transformer over the rows of each group -> embeddings of cells."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        self.in_linear = nn.Linear(c.group_size, c.embed_dim)
        self.tf_col = nn.ModuleDict({"blocks": nn.ModuleList(InducedAttention(c) for _ in range(c.col_num_blocks))})
        if c.col_target_aware:
            self.y_encoder = LabelEncoder(c.max_classes, c.embed_dim)
        if c.col_affine:
            self.out_w, self.out_b = nn.Linear(c.embed_dim, c.embed_dim), nn.Linear(c.embed_dim, c.embed_dim)
            self.ln_w, self.ln_b = (nn.LayerNorm(c.embed_dim, bias=not c.bias_free_ln) for _ in range(2))

    def forward(self, X: Tensor, y_train: Tensor, log_n: Tensor, recompute: bool = False) -> Tensor:
        """X (B, N, M), y_train (B, n), log_n (1,) -> (B, G, N, E)."""
        groups = group_features(X, self.config.col_grouping, self.config.group_size)
        return self.embed(groups, y_train, log_n, recompute)

    def embed(self, groups: Tensor, y_train: Tensor, log_n: Tensor, recompute: bool = False) -> Tensor:
        """groups (B, G, N, group_size) -> (B, G, N, E), for any subset of the groups: they do not see each other."""
        tokens = self.in_linear(groups)  # (B, G, N, E)
        if self.config.col_target_aware:
            labels = self.y_encoder(y_train)  # (B, n, E)
            tokens += F.pad(labels, (0, 0, 0, groups.shape[2] - y_train.shape[1]))[:, None]
        tokens = tokens.flatten(0, 1)  # (B*G, N, E)
        for block in self.tf_col["blocks"].children():
            tokens = run(block, tokens, y_train.shape[1], log_n, recompute=recompute)
        tokens = tokens.unflatten(0, groups.shape[:2])  # (B, G, N, E)
        if self.config.col_affine:
            tokens = groups * self.ln_w(self.out_w(tokens)) + self.ln_b(self.out_b(tokens))
        return tokens


def group_features(X: Tensor, grouping: str, size: int) -> Tensor:
    """The features that each column token sees: X (B, N, M) -> (B, G, N, size).

    none: one feature per token, G = M
    circular: token j sees features j + 1, j + 2, j + 4, ... modulo M, G = M
    disjoint: neighbors in groups of `size`, the last group padded with zeros, G = ceil(M / size)
    """
    columns = X.transpose(1, 2)  # (B, M, N)
    if grouping == "none":
        return columns.unsqueeze(-1)
    if grouping == "circular":
        return torch.stack([columns.roll(-(2**i), 1) for i in range(size)], -1)
    padded = F.pad(columns, (0, 0, 0, -X.shape[2] % size))
    return padded.unflatten(1, (-1, size)).transpose(2, 3)
