"""Stage 2, row interaction: the tokens of a row attend to each other, and a few CLS tokens collect the result.

Tokens of all rows lie one after another, see layout.Rows. E embedding, T = row_num_cls + G tokens of a row, D =
row_num_cls * E row representation.
"""

import torch
from torch import Tensor, nn

from tabicl_train.model.attention import Block, LayerNorm, Rotary, RowSpans, run
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.layout import Rows


class Merge(torch.autograd.Function):
    """Two sets of tokens, each token at its position among all: autograd's own rules would copy all of them twice."""

    @staticmethod
    def forward(ctx, tokens: Tensor, positions: Tensor, others: Tensor, other_positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions, other_positions)
        merged = tokens.new_empty(len(tokens) + len(others), tokens.shape[1])
        return merged.index_copy_(0, positions, tokens).index_copy_(0, other_positions, others)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        positions, other_positions = ctx.saved_tensors
        return grad.index_select(0, positions), None, grad.index_select(0, other_positions), None


class RowInteraction(nn.Module):
    """A transformer over the tokens of each row, whose CLS tokens are the row's representation."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        blocks = (
            Block(c.embed_dim, c.row_num_heads, c.ff_factor, "none", c.dropout, c.bias_free_ln, c.zero_init)
            for _ in range(c.row_num_blocks)
        )
        rope = Rotary(c.embed_dim // c.row_num_heads, c.row_rope_base, c.row_rope_interleaved)
        self.tf_row = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "rope": rope})
        self.cls_tokens = nn.Parameter(torch.empty(c.row_num_cls, c.embed_dim))
        self.out_ln = LayerNorm(c.embed_dim, bias=not c.bias_free_ln)
        nn.init.trunc_normal_(self.cls_tokens, std=0.02)

    def forward(self, tokens: Tensor, rows: Rows, recompute: bool = False) -> Tensor:
        """tokens (tokens, E) of all cells -> representations of all rows (rows, D), in the order of `rows`."""
        x = self.add_cls(tokens, rows)
        return self.interact(x, rows.cls, self.spans(rows), recompute)

    def spans(self, rows: Rows) -> RowSpans:
        rope = self.tf_row["rope"]
        _, longest = rows.runs[-1].tolist()
        cos, sin = rope(longest)
        return RowSpans(rows.runs, rows.starts, cos, sin, self.config.row_rope_interleaved)

    def add_cls(self, tokens: Tensor, rows: Rows) -> Tensor:
        """The tokens of all cells and, in front of those of each row, its CLS tokens, (rows * T, E)."""
        cls_tokens = self.cls_tokens.to(tokens.dtype).repeat(len(rows.starts) - 1, 1)  # (rows * row_num_cls, E)
        return Merge.apply(tokens, rows.tokens, cls_tokens, rows.cls)

    def interact(self, x: Tensor, cls: Tensor, spans: RowSpans, recompute: bool = False) -> Tensor:
        """x (rows * T, E), of which the CLS tokens are at positions cls -> representations (rows, D)."""
        *blocks, last = self.tf_row["blocks"].children()
        for block in blocks:
            x = run(block, x, None, spans, recompute=recompute)
        collected = run(last, x.index_select(0, cls), x, spans, recompute=recompute)  # (rows * row_num_cls, E)
        return self.out_ln(collected).view(-1, self.config.row_dim)
