"""The whole network: from tables to the logits of their query rows.

B tables, N rows of which the first n are labelled (train_size), M features, C classes.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model.column import ColumnEmbedding
from tabicl_train.model.config import PARTS, TabICLConfig
from tabicl_train.model.cost import forward_flops, kept_values
from tabicl_train.model.family import Network
from tabicl_train.model.icl import InContextLearner
from tabicl_train.model.public_config import to_public
from tabicl_train.model.row import RowInteraction
from tabicl_train.model.scaling import Scaling, log_count


class TabICL(Network):
    """Tabular in-context classifier, TabICLv2 (arXiv 2602.11139) or v1 (arXiv 2502.05564) by configuration.

    Raises ValueError with every problem of the configuration.
    """

    parts = PARTS
    forward_flops = staticmethod(forward_flops)
    kept_values = staticmethod(kept_values)
    to_public = staticmethod(to_public)

    def __init__(self, config: TabICLConfig):
        super().__init__(config)
        if problems := config.problems():
            raise ValueError("This model cannot be built: " + "; ".join(problems))
        self.config = config
        self.col_embedder = ColumnEmbedding(config)
        self.row_interactor = RowInteraction(config)
        self.icl_predictor = InContextLearner(config)

    def forward(self, X: Tensor, y_train: Tensor, checkpoint_rows: int | None = None) -> Tensor:
        """X (B, N, M) float32, y_train (B, n) int64 in [0, C), labels of the first n rows -> logits (B, N - n, C).

        checkpoint_rows: recompute activations in the backward pass of tables with more rows, 0 = never; by default the
            configuration's value

        Raises ValueError for other shapes and dtypes, and for labels outside this range on a CPU; on a GPU, looking at
        them would make the host wait.
        """
        self._check(X, y_train)
        log_n = log_count(y_train.shape[1], X)
        limit = self.config.checkpoint_rows if checkpoint_rows is None else checkpoint_rows
        recompute = 0 < limit < X.shape[1]
        tokens = self.col_embedder(X, y_train, log_n, recompute)  # (B, G, N, E)
        rows = self.row_interactor(tokens, recompute)  # (B, N, D)
        return self.icl_predictor(rows, y_train, log_n, recompute)

    def losses(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Cross entropy: logits (B, N - n, C), y (B, N - n) int64 in [0, C) -> (B,) float32, mean over query rows."""
        losses = F.cross_entropy(predictions.flatten(0, 1).float(), y.flatten(), reduction="none")  # (B * (N - n),)
        return losses.view(y.shape).mean(1)

    def blocks(self) -> Iterator[nn.Module]:
        """The transformer blocks of all stages, which are worth compiling: `block.compile(dynamic=True)`."""
        stages = (self.col_embedder.tf_col, self.row_interactor.tf_row, self.icl_predictor.tf_icl)
        return (block for stage in stages for block in stage["blocks"].children())

    def named_scalings(self) -> Iterator[tuple[str, Scaling]]:
        """The attention layers with a scalable softmax: `column.0`, ..., `icl.11`; see `Scaling.multipliers`."""
        for stage, part in (("column", self.col_embedder.tf_col), ("icl", self.icl_predictor.tf_icl)):
            for i, block in enumerate(part["blocks"].children()):  # at most one in each
                yield from ((f"{stage}.{i}", layer) for layer in block.modules() if isinstance(layer, Scaling))

    def _check(self, X: Tensor, y_train: Tensor) -> None:
        if X.dim() != 3 or X.dtype != torch.float32 or 0 in X.shape:
            raise ValueError(f"X must be float32 (tables, rows, features), is {X.dtype} {tuple(X.shape)}")
        if y_train.dim() != 2 or y_train.dtype != torch.int64 or y_train.shape[0] != X.shape[0]:
            raise ValueError(
                f"y_train must be int64 ({X.shape[0]} tables, labelled rows), is {y_train.dtype} {tuple(y_train.shape)}"
            )
        if not 1 <= y_train.shape[1] < X.shape[1]:
            raise ValueError(
                f"of {X.shape[1]} rows {y_train.shape[1]} are labelled; at least one row must be, and one must not"
            )
        if y_train.device.type == "cpu" and not 0 <= y_train.min() <= y_train.max() < self.config.max_classes:
            raise ValueError(
                f"labels must be in 0..{self.config.max_classes - 1}, are in {y_train.min()}..{y_train.max()}"
            )
