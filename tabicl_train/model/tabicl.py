"""The whole network: from tables to predictions for their query rows, and their loss.

B tables, N rows of which the first n are labeled (train_size), M features, C logits, Q quantiles.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model.column import ColumnEmbedding
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.cost import forward_flops, kept_values, pack_tokens, token_groups
from tabicl_train.model.family import Network
from tabicl_train.model.icl import InContextLearner
from tabicl_train.model.layout import column_layout, context_layout, log_counts, row_layout
from tabicl_train.model.pack import Pack, Shape
from tabicl_train.model.public_config import to_public
from tabicl_train.model.quantiles import guess_loss, pinball
from tabicl_train.model.row import RowInteraction
from tabicl_train.model.scaling import SSA, Scaling


class TabICL(Network):
    """Tabular in-context learner, TabICLv2 (arXiv 2602.11139) or v1 (arXiv 2502.05564) by configuration.

    It predicts logits of classes or, with max_classes=0, quantiles of a number, whose order nothing enforces.

    Raises ValueError with every problem of the configuration.
    """

    parts = {"column": "col_embedder", "row": "row_interactor", "icl": "icl_predictor"}
    predicts_quantiles = True
    predicts_real_tables = True
    forward_flops = staticmethod(forward_flops)
    kept_values = staticmethod(kept_values)
    pack_tokens = staticmethod(pack_tokens)
    to_public = staticmethod(to_public)
    guess_loss = staticmethod(guess_loss)

    def __init__(self, config: TabICLConfig):
        super().__init__(config)
        if problems := config.problems():
            raise ValueError("This model cannot be built: " + "; ".join(problems))
        self.config = config
        self.col_embedder = ColumnEmbedding(config)
        self.row_interactor = RowInteraction(config)
        self.icl_predictor = InContextLearner(config)

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predictions for the query rows of all tables, one table after the other, (query rows, C) or (query rows, Q).

        checkpoint_rows: recompute activations in the backward pass of packs with a longer table, 0 = never; by default
            the configuration's value

        Raises ValueError for impossible sizes, other dtypes, and classes outside 0..C-1 on a CPU; on a GPU, looking at
        them would make the host wait.
        """
        self._check(pack)
        limit = self.config.checkpoint_rows if checkpoint_rows is None else checkpoint_rows
        recompute = 0 < limit < max(N for N, _, _ in pack.shapes)
        sizes, shapes = self.groups(pack)
        log_n = log_counts(sizes)
        columns = column_layout(sizes, shapes, self.config.col_num_inducing)
        tokens = self.col_embedder(pack, columns, log_n, recompute)  # (tokens, E)
        rows = row_layout(sizes, shapes, self.config.row_num_cls, columns)
        represented = self.row_interactor(tokens, rows, recompute).index_select(0, rows.order)  # (rows, D)
        context = context_layout(sizes, shapes)
        labels = pack.y.index_select(0, context.labels)
        return self.icl_predictor(represented, labels, context, log_n, recompute)

    def groups(self, pack: Pack) -> tuple[Tensor, list[Shape]]:
        """N, n and the number of feature groups G of each table, int64 (B, 3) on the device, and on the host."""
        sizes, shapes = pack.sizes, [(N, n, token_groups(self.config, M)) for N, n, M in pack.shapes]
        if self.config.col_grouping == "disjoint":
            N, n, M = sizes.unbind(1)
            sizes = torch.stack([N, n, -(-M // self.config.group_size)], 1)
        return sizes, shapes

    def row_losses(self, predictions: Tensor, pack: Pack) -> Tensor:
        """Cross entropy of logits (query rows, C), or pinball loss of quantiles (query rows, Q), (query rows,)."""
        if self.config.is_regression:
            return pinball(predictions, pack.queries())
        return F.cross_entropy(predictions.float(), pack.queries(), reduction="none")

    def blocks(self) -> Iterator[nn.Module]:
        """The transformer blocks of all stages, which are worth compiling: `block.compile(dynamic=True)`."""
        stages = (self.col_embedder.tf_col, self.row_interactor.tf_row, self.icl_predictor.tf_icl)
        return (block for stage in stages for block in stage["blocks"].children())

    def named_scalings(self) -> Iterator[tuple[str, Scaling | SSA]]:
        """The attention layers with a scalable softmax, or with signed averaging: `column.0`, ..., `icl.11`; see
        `Scaling.multipliers`."""
        for stage, part in (("column", self.col_embedder.tf_col), ("icl", self.icl_predictor.tf_icl)):
            for i, block in enumerate(part["blocks"].children()):  # at most one in each
                yield from ((f"{stage}.{i}", layer) for layer in block.modules() if isinstance(layer, Scaling | SSA))

    def _check(self, pack: Pack) -> None:
        regression = self.config.is_regression
        kind = torch.float32 if regression else torch.int64
        if pack.X.dtype != torch.float32 or pack.y.dtype != kind:
            name = str(kind).removeprefix("torch.")
            raise ValueError(f"X must be float32 and labels {name}, are {pack.X.dtype} and {pack.y.dtype}")
        for N, n, _ in pack.shapes:
            if not 1 <= n < N:
                raise ValueError(f"of {N} rows {n} are labeled; at least one row must be, and one must not")
        if regression or pack.y.device.type != "cpu":
            return
        if not 0 <= pack.y.min() <= pack.y.max() < self.config.max_classes:
            raise ValueError(
                f"labels must be in 0..{self.config.max_classes - 1}, are in {pack.y.min()}..{pack.y.max()}"
            )
