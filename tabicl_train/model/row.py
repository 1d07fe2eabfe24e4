"""Stage 2, row interaction: the tokens of a row attend to each other, and a few CLS tokens collect the result.

B tables, N rows, G feature groups, E embedding, T = row_num_cls + G tokens, D = row_num_cls * E row representation.
"""

import torch
from torch import Tensor, nn

from tabicl_train.model.attention import Block, Rotary, run
from tabicl_train.model.config import TabICLConfig


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
        self.out_ln = nn.LayerNorm(c.embed_dim, bias=not c.bias_free_ln)
        nn.init.trunc_normal_(self.cls_tokens, std=0.02)

    def forward(self, tokens: Tensor, recompute: bool = False) -> Tensor:
        """tokens (B, G, N, E) -> row representations (B, N, D)."""
        B, _, N, _ = tokens.shape
        num_cls = self.config.row_num_cls
        cls_tokens = self.cls_tokens.to(tokens.dtype).expand(B, N, -1, -1)
        rows = torch.cat([cls_tokens, tokens.transpose(1, 2)], dim=2).flatten(0, 1)  # (B*N, T, E)
        *blocks, last = self.tf_row["blocks"].children()
        rotation = self.tf_row["rope"](rows.shape[1])
        for block in blocks:
            rows = run(block, rows, rotation=rotation, recompute=recompute)
        collected = run(last, rows[:, :num_cls], rows, rotation=rotation, recompute=recompute)  # (B*N, row_num_cls, E)
        return self.out_ln(collected).reshape(B, N, -1)
