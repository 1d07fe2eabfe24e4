"""A TabICL with thinking rows and a retrieval decoder, as a network that is registered like one of a plug-in.

Thinking rows are learned rows without a label in front of the labeled rows of each table, in in-context learning. The
retrieval decoder compares the final representation of a query row with those of the labeled rows; the weights of the
rows of a class add up to its probability, whose logarithm is added to the logits. Either can be left out.

A copy of this file with another name in the two places in quotes is a plug-in by itself: `tabicl-train
plugins=[./my_copy.py] model=my_copy`.

Shapes: N rows, the first n of which are labeled, T thinking rows, D width of a row representation, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from priors.options import option
from tabicl_train import register
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.attention import Attention, attend, call_block
from tabicl_train.model.costs import block_flops, block_values, icl_flops, kept_by_part
from tabicl_train.model.pack import Context, InFront, Spans, rows_in_front
from tabicl_train.model.stages import InContextLearner, Merge, label_values

__all__ = ["Retrieval", "RetrievalConfig"]

FIRST_SCALE = 10.0  # initial factor of cosines: a row with cosine 1 gets e^10 times the weight of one with 0
SMALLEST = 1e-3  # added to probabilities before their logarithm, since a class without labeled rows has probability 0


@dataclass
class RetrievalConfig(TabICLConfig):
    """Settings of Retrieval, in addition to those of a TabICL."""

    family: str = "retrieval"
    """The name of the network; it tells its checkpoints from others."""
    thinking_rows: int = option(16, at_least=0)
    """Learned rows in front of the labeled rows of each table, in in-context learning; 0 has none."""
    retrieval: bool = True
    """Add the logarithms of class probabilities that are retrieved from the labeled rows; classifiers only."""

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each; none if the network can be built."""
        problems = super().problems()
        if self.retrieval and self.is_regression:
            problems.append("retrieval adds up the weights of classes, so regression needs retrieval=false")
        elif self.retrieval and self.row_dim < self.max_classes:
            width = f"row_num_cls * embed_dim ({self.row_num_cls} * {self.embed_dim})"
            problems.append(f"{width} is below max_classes ({self.max_classes}), so a row cannot hold its class")
        return problems


class RetrievalDecoder(nn.Module):
    """Logarithms of class probabilities from the labeled rows that resemble a query row, times a learned weight.

    The logit of class c for a query row x gets w log(p_c + 0.001), where p_c is the sum over the labeled rows j of the
    class of softmax_j(s cos(W_q x, W_k x_j)), and the scale s and the weight w are learned. w starts at 0: with 1,
    networks learned less (ROC AUC on real tasks 0.726 instead of 0.736 after two minutes of training, two seeds).
    """

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__()
        self.classes = config.max_classes
        self.query = nn.Linear(config.row_dim, config.row_dim, bias=False)
        self.key = nn.Linear(config.row_dim, config.row_dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(FIRST_SCALE).log())
        self.weight = nn.Parameter(torch.zeros(()))

    def keys(self, labeled: Tensor) -> Tensor:
        """Return the keys of labeled rows: (labeled rows, D) -> float32 of norm 1, (labeled rows, D)."""
        with torch.autocast(labeled.device.type, enabled=False):  # bf16 rounds a score of 10 by 0.03
            return F.normalize(self.key(labeled.float()), dim=-1)

    def forward(self, queries: Tensor, keys: Tensor, y: Tensor, spans: Spans) -> Tensor:
        """Return what is added to the logits of query rows.

        Parameters
        ----------
        queries : Tensor
            Representations of the query rows, (query rows, D).
        keys : Tensor
            What `keys` has returned, (labeled rows, D).
        y : Tensor
            Classes of the labeled rows, (labeled rows,).
        spans : Spans
            The labeled rows of each query row.

        Returns
        -------
        Tensor
            float32 (query rows, C)
        """
        with torch.autocast(queries.device.type, enabled=False):
            D = queries.shape[1]
            q = F.normalize(self.query(queries.float()), dim=-1) * self.log_scale.exp()
            q = q * D**0.5  # `attend` divides by it
            values = label_values(y, D).float()  # one-hot; GPU kernels need values as wide as the keys
            p = attend(q[:, None], keys[:, None], values[:, None], spans)[:, 0, : self.classes]
            return self.weight * torch.log(p + SMALLEST)


class RetrievalLearner(InContextLearner):
    """In-context learning with thinking rows and the retrieval decoder."""

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__(config)
        self.num_thinking = config.thinking_rows
        if config.thinking_rows:
            self.thinking_rows = nn.Parameter(torch.empty(config.thinking_rows, config.row_dim))
            nn.init.trunc_normal_(self.thinking_rows, std=0.02)  # like other learned tokens
        self.retrieval = RetrievalDecoder(config) if config.retrieval else None

    def forward(self, rows: Tensor, y: Tensor, context: Context, log_n: Tensor, recompute: bool = False) -> Tensor:
        """Predict query rows: rows (N of all tables, D), y (labeled rows,) -> logits (query rows, C).

        See `InContextLearner`.
        """
        if not self.num_thinking and self.retrieval is None:
            return super().forward(rows, y, context, log_n, recompute)
        n = context.labeled
        layout = rows_in_front(context, self.num_thinking)
        longer = layout.context
        keys = longer.labeled  # the thinking rows and the labeled rows
        rows = torch.cat([self.think(rows[:n] + self.y_encoder(y), layout), rows[n:]])

        # Thinking rows do not count in log_n.
        *blocks, last = self.tf_icl["blocks"].children()
        for block in blocks:
            rows = call_block(block, rows, keys, longer.all, log_n, longer.table, recompute=recompute)
        if self.retrieval is None:
            table = longer.table[keys:]
            queries = call_block(last, rows[keys:], rows[:keys], longer.queries, log_n, table, recompute=recompute)
            return self.decoder(self.ln(queries))

        # The retrieval decoder reads the labeled rows after the last block, so that block computes all rows.
        rows = self.ln(call_block(last, rows, keys, longer.all, log_n, longer.table, recompute=recompute))
        queries = rows[keys:]
        remembered = self.retrieval.keys(rows.index_select(0, layout.labeled))
        return self.decoder(queries) + self.retrieval(queries, remembered, y, context.queries)

    def keys(self, rows: Tensor, y: Tensor, context: Context, log_n: Tensor) -> list[Tensor]:
        """Return what predictions need of the labeled rows (labeled rows, D).

        These are the tensors of `InContextLearner` and, for the retrieval decoder, keys and labels.
        """
        if not self.num_thinking and self.retrieval is None:
            return super().keys(rows, y, context, log_n)
        layout = rows_in_front(context, self.num_thinking, as_queries=True)
        rows = self.think(rows + self.y_encoder(y), layout)
        table = layout.context.table[layout.context.labeled :]
        *blocks, last = self.tf_icl["blocks"].children()
        kept = []
        for block in blocks:
            kept.append(block.keys(rows))
            rows = block(rows, kept[-1], layout.context.queries, log_n, table)
        kept.append(last.keys(rows))
        if self.retrieval is None:
            return kept
        rows = self.ln(last(rows, kept[-1], layout.context.queries, log_n, table))
        return [*kept, self.retrieval.keys(rows.index_select(0, layout.labeled)), y]

    def answer(self, queries: Tensor, keys: list[Tensor], context: Context, log_n: Tensor) -> Tensor:
        """Predict query rows (query rows, D) from what `keys` has returned -> logits (query rows, C)."""
        longer = rows_in_front(context, self.num_thinking).context
        blocks = list(self.tf_icl["blocks"].children())
        for block, keys_of_block in zip(blocks, keys[: len(blocks)], strict=True):
            queries = block(queries, keys_of_block, longer.queries, log_n, longer.table[longer.labeled :])
        queries = self.ln(queries)
        logits = self.decoder(queries)
        if self.retrieval is None:
            return logits
        remembered, y = keys[len(blocks) :]
        return logits + self.retrieval(queries, remembered, y, context.queries)

    def think(self, labeled: Tensor, layout: InFront) -> Tensor:
        """Put the thinking rows in front of the labeled rows (labeled rows, D) of each table -> (both, D)."""
        if not self.num_thinking:
            return labeled
        tables = len(layout.front) // self.num_thinking
        thinking = self.thinking_rows.to(labeled.dtype).repeat(tables, 1)  # (tables * T, D)
        return Merge.apply(labeled, layout.labeled, thinking, layout.front)


@register.network("retrieval", settings=RetrievalConfig)
class Retrieval(TabICL):
    """A TabICL with thinking rows and a retrieval decoder; without both it equals a TabICL to the bit."""

    in_context_learner = RetrievalLearner
    config: RetrievalConfig

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether Muon optimizes a parameter: those of a TabICL, and the projections of the retrieval decoder."""
        return super().is_hidden_matrix(name, parameter) or (parameter.ndim == 2 and ".retrieval." in name)

    def named_attentions(self) -> Iterator[tuple[str, Attention]]:
        """Yield the layers whose keys are labeled rows; with thinking rows, only those of the columns are."""
        for name, attention in super().named_attentions():
            if not self.config.thinking_rows or name.startswith("column."):
                yield name, attention

    @staticmethod
    def forward_flops(config: RetrievalConfig, num_rows: int, train_size: int, num_features: int) -> float:
        """Count the FLOPs of one table's forward pass; see `TabICL`."""
        N, n, T, D = num_rows, train_size, config.thinking_rows, config.row_dim
        flops = TabICL.forward_flops(config, N, n, num_features)
        flops += icl_flops(config, N + T, n + T) - icl_flops(config, N, n) - 2 * T * config.label_width * D
        if config.retrieval:
            gate = register.scaling[config.icl_scaling].flops(D, config.icl_num_heads)
            last = block_flops(config, D, N + T, n + T) - block_flops(config, D, N - n, n + T) + (n + T) * gate
            flops += last + 2 * N * D * D + 4 * (N - n) * n * D
        return flops

    @staticmethod
    def kept_values(
        config: RetrievalConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        """Count the values of one table that are kept for the backward pass; see `TabICL`."""
        N, n, T, D = num_rows, train_size, config.thinking_rows, config.row_dim
        kept = TabICL.kept_values(config, N, n, num_features, recomputed)
        longer = kept_by_part(config, N + T, n + T, num_features, recomputed)["icl"]
        kept += longer - kept_by_part(config, N, n, num_features, recomputed)["icl"]
        if config.retrieval:
            if not recomputed:  # the last block computes the thinking and labeled rows too
                inner, last = block_values(config, N + T, n + T, num_features)["icl"]
                kept += inner - last
            kept += 5 * N * D  # rows before and after their norm, queries, keys, one-hot labels and results (measured)
        return kept

    @staticmethod
    def encoded_bytes(config: RetrievalConfig, train_size: int, num_features: int, num_classes: int) -> float:
        """Count the bytes of what `encode` keeps for a table, in float32."""

        def bytes_of_rows(rows: int) -> float:
            return TabICL.encoded_bytes(config, rows, num_features, num_classes)

        size = bytes_of_rows(train_size + config.thinking_rows)
        if config.retrieval:  # keys as wide as those of a block, without values
            size += (bytes_of_rows(train_size) - bytes_of_rows(0)) / (2 * config.icl_num_blocks)
        return size
