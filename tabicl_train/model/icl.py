"""Stage 3, in-context learning: all rows attend to the labelled rows, and query rows become logits.

B tables, N rows of which the first n are labelled, D row representation, C classes.
"""

import torch
from torch import Tensor, nn

from tabicl_train.model.attention import Block, run
from tabicl_train.model.column import LabelEncoder
from tabicl_train.model.config import TabICLConfig


class InContextLearner(nn.Module):
    """A transformer over the rows of a table, with the labels added to the labelled rows."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        rest = (c.dropout, c.bias_free_ln, c.zero_init, c.scaling_bound)
        blocks = (Block(c.row_dim, c.icl_num_heads, c.ff_factor, c.icl_scaling, *rest) for _ in range(c.icl_num_blocks))
        self.tf_icl = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.ln = nn.LayerNorm(c.row_dim, bias=not c.bias_free_ln)
        self.y_encoder = LabelEncoder(c.max_classes, c.row_dim)
        self.decoder = nn.Sequential(
            nn.Linear(c.row_dim, 2 * c.row_dim), nn.GELU(), nn.Linear(2 * c.row_dim, c.max_classes)
        )

    def forward(self, rows: Tensor, y_train: Tensor, log_n: Tensor, recompute: bool = False) -> Tensor:
        """rows (B, N, D), y_train (B, n), log_n (1,) -> logits (B, N - n, C)."""
        n = y_train.shape[1]
        labelled, queries = rows.split([n, rows.shape[1] - n], dim=1)
        labelled = labelled + self.y_encoder(y_train)
        rows = torch.cat([labelled, queries], dim=1)
        *blocks, last = self.tf_icl["blocks"].children()
        for block in blocks:
            rows = run(block, rows, num_keys=n, log_n=log_n, recompute=recompute)
        # only query rows pass the last block: nothing reads the labelled rows after it
        queries = run(last, rows[:, n:], rows[:, :n], log_n=log_n, recompute=recompute)  # (B, N - n, D)
        return self.decoder(self.ln(queries))
