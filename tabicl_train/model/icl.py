"""Stage 3, in-context learning: all rows attend to the labeled rows, and query rows become predictions.

Rows of all tables lie one after another, see layout.Context. B tables, D row representation, C logits or quantiles.
"""

import torch
from torch import Tensor, nn

from tabicl_train.model.attention import Block, LayerNorm, run
from tabicl_train.model.column import LabelEncoder
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.kernels.linear import Linear
from tabicl_train.model.layout import Context


class InContextLearner(nn.Module):
    """A transformer over the rows of a table, with the labels added to the labeled rows."""

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        rest = (c.dropout, c.bias_free_ln, c.zero_init, c.scaling_bound, False, c.ssa_exponent)
        blocks = (Block(c.row_dim, c.icl_num_heads, c.ff_factor, c.icl_scaling, *rest) for _ in range(c.icl_num_blocks))
        self.tf_icl = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.ln = LayerNorm(c.row_dim, bias=not c.bias_free_ln)
        self.y_encoder = LabelEncoder(c.label_width, c.row_dim)
        self.decoder = nn.Sequential(Linear(c.row_dim, 2 * c.row_dim), nn.GELU(), Linear(2 * c.row_dim, c.outputs))

    def forward(self, rows: Tensor, y: Tensor, context: Context, log_n: Tensor, recompute: bool = False) -> Tensor:
        """Predictions for the query rows (query rows, C).

        rows: (rows, D) in the order of `context`, labels y (labeled rows,), log_n (B,)
        """
        n = context.labeled
        rows = torch.cat([rows[:n] + self.y_encoder(y), rows[n:]])
        *blocks, last = self.tf_icl["blocks"].children()
        for block in blocks:
            rows = run(block, rows, n, context.all, log_n, context.table, recompute=recompute)
        # only query rows pass the last block: nothing reads the labeled rows after it
        queries = run(last, rows[n:], rows[:n], context.queries, log_n, context.table[n:], recompute=recompute)
        return self.decoder(self.ln(queries))
