"""The TabICL network: from tables to predictions for their query rows, and their loss.

It has three stages: columns become embeddings of cells, rows of cells become vectors, and in-context learning predicts
query rows from labeled ones. The tokens of all tables follow one another, see pack.py.

B tables, N rows of which the first n are labeled (train_size), M features, G feature groups, E embedding, I inducing
points, T = row_num_cls + G tokens of a row, D = row_num_cls * E row representation, C logits, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from priors.options import check
from tabicl_train.doors import register
from tabicl_train.model.attention import Attention, Block
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.costs import (
    column_flops,
    flash_workspace,
    float32_values,
    icl_flops,
    kept_by_part,
    largest_block,
    quantile_values,
    row_flops,
    token_groups,
)
from tabicl_train.model.encoding import Encoded, decode_queries, encode_labeled, encoded_bytes, represent_queries
from tabicl_train.model.family import Network
from tabicl_train.model.pack import (
    Columns,
    Context,
    FlatLayout,
    Pack,
    Rows,
    Shape,
    column_layout,
    context_layout,
    log_counts,
    row_layout,
    with_programs,
)
from tabicl_train.model.padding import Size, mean_size, pad_columns, pad_context, pad_rows, round_up, totals_of
from tabicl_train.model.public_config import to_public
from tabicl_train.model.scaling import SSA, Scaling
from tabicl_train.model.stages import (
    ColumnEmbedding,
    InContextLearner,
    InducedAttention,
    RowInteraction,
    feature_index,
)

__all__ = ["TabICL"]


class Layout(NamedTuple):
    """The positions of all tokens of a pack."""

    columns: Columns
    rows: Rows
    context: Context
    log_n: Tensor  # float32 (B,), the logarithm of the number of labeled rows of each table


class TabICL(Network):
    """Tabular in-context learner, TabICLv2 (arXiv 2602.11139) or v1 (arXiv 2502.05564) by configuration.

    It predicts logits of classes or, with max_classes=0, quantiles of a number, which may not be in order.

    Parameters
    ----------
    config : TabICLConfig
        The architecture.

    Raises
    ------
    ValueError
        With every problem of the configuration.

    References
    ----------
    Qu et al., TabICL, arXiv 2502.05564, section 3, and its second version, arXiv 2602.11139.
    """

    parts = {"column": "col_embedder", "row": "row_interactor", "icl": "icl_predictor"}
    # The stages; a subclass may have another one. Where it puts one in the place of ours later, the weights of a seed
    # differ, since both are drawn.
    column_embedding: ClassVar[type[ColumnEmbedding]] = ColumnEmbedding
    row_interaction: ClassVar[type[RowInteraction]] = RowInteraction
    in_context_learner: ClassVar[type[InContextLearner]] = InContextLearner
    to_public = staticmethod(to_public)

    def __init__(self, config: TabICLConfig):
        super().__init__(config)
        if problems := check(config):
            raise ValueError("This model cannot be built: " + "; ".join(problems))
        self.config = config
        self.col_embedder = self.column_embedding(config)
        self.row_interactor = self.row_interaction(config)
        self.icl_predictor = self.in_context_learner(config)

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predict the query rows of all tables, one table after the other.

        Parameters
        ----------
        pack : Pack
            The tables.
        checkpoint_rows : int, optional
            Recompute activations in the backward pass of packs with a longer table, 0 = never; by default the
            configuration's value.

        Returns
        -------
        Tensor
            Logits (query rows, C) or quantiles (query rows, Q).

        Raises
        ------
        ValueError
            For impossible sizes, other dtypes, and classes outside 0..C-1 on a CPU; on a GPU, checking them would make
            the host wait.
        """
        self._check(pack)
        limit = self.config.checkpoint_rows if checkpoint_rows is None else checkpoint_rows
        recompute = 0 < limit < max(N for N, _, _ in pack.shapes)
        columns, rows, context, log_n = self.layout(self.config, pack) if pack.layout is None else pack.layout.open()
        tokens = self.col_embedder(pack, columns, log_n, recompute)  # (tokens, E)
        represented = self.row_interactor(tokens, rows, recompute).index_select(0, rows.order)  # (rows, D)
        labels = pack.y.index_select(0, context.labels)
        return self.icl_predictor(represented, labels, context, log_n, recompute)

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether Muon optimizes it: matrices of the blocks, but no inducing vectors or scaling MLPs."""
        return parameter.ndim == 2 and ".blocks." in name and "ssmax" not in name and "ind_vectors" not in name

    def encode(self, context: Pack, *, num_classes: int, tokens: int) -> Encoded:
        """Compute the keys and values of the labeled rows of tables.

        Parameters
        ----------
        context : Pack
            Tables that have labeled rows only, with labels in 0..num_classes-1. With more than max_classes classes,
            each must occur in every table.
        num_classes : int
            C; 0 for regression.
        tokens : int
            About so many tokens of cells are in memory at a time, or those of one column if these are more.

        Returns
        -------
        Encoded
        """
        return encode_labeled(self, context, num_classes, tokens)

    def decode(self, state: Encoded, queries: Pack, *, temperature: float, tokens: int) -> Tensor:
        """Predict query rows from the keys and values of labeled rows.

        Parameters
        ----------
        state : Encoded
            From `encode`, of tables with the same features.
        queries : Pack
            Tables that have query rows only.
        temperature : float
            Logits are divided by it, in each node of a tree of classes.
        tokens : int
            As for `encode`.

        Returns
        -------
        Tensor
            Logits (query rows, C), quantiles (query rows, Q), or with more than max_classes classes logarithms of
            probabilities (query rows, C).
        """
        return decode_queries(self, state, queries, temperature, tokens)

    @torch.no_grad()
    def represent(self, state: Encoded, queries: Pack, *, tokens: int) -> Tensor:
        """Compute the representations of query rows, which in-context learning compares.

        Parameters
        ----------
        state : Encoded
            From `encode`, of tables with the same features.
        queries : Pack
            Tables that have query rows only.
        tokens : int
            As for `encode`.

        Returns
        -------
        Tensor
            (query rows, D).
        """
        return represent_queries(self, queries, state.columns, tokens)

    @staticmethod
    def groups(config: TabICLConfig, pack: Pack) -> tuple[Tensor, list[Shape]]:
        """Return N, n and G of each table, int64 (B, 3) on the device, and the same as a list on the host."""
        shapes = [(N, n, token_groups(config, M)) for N, n, M in pack.shapes]
        sizes = pack.sizes
        if config.col_grouping == "disjoint":
            N, n, M = sizes.unbind(1)
            sizes = torch.stack([N, n, -(-M // config.group_size)], 1)
        return sizes, shapes

    @staticmethod
    def layout(config: TabICLConfig, pack: Pack, complete: bool = False) -> Layout:
        """Lay out the tokens of a pack; complete: with all that is otherwise computed where it is read."""
        sizes, shapes = TabICL.groups(config, pack)
        columns = column_layout(sizes, shapes, config.col_num_inducing)
        rows = row_layout(sizes, shapes, config.row_num_cls, columns)
        if complete:
            cells = feature_index(pack.sizes, pack.shapes, columns, config.col_grouping, config.group_size)
            columns = columns._replace(cells=cells)
            rows = with_programs(rows)
        return Layout(columns, rows, context_layout(sizes, shapes), log_counts(sizes))

    @classmethod
    def prepared(cls, config: TabICLConfig, pack: Pack) -> FlatLayout | None:
        """Lay out a pack on the CPU; see `Network`."""
        # A subclass may lay it out otherwise.
        if cls.forward is not TabICL.forward:
            return None
        most_targets = max(N - n for N, n, _ in pack.shapes)
        return FlatLayout.of(cls.layout(config, pack, complete=True), pack.target_positions(), most_targets)

    @classmethod
    def typical_size(
        cls, config: TabICLConfig, packs: Sequence[Sequence[Shape]], most_rows: int, most_features: int
    ) -> Size | None:
        """Return the size of a typical pack, or None if packs are not padded; see `Network`."""
        # A disjoint grouping has more cells than tokens, signed averaging computes run by run, and a plug-in may do
        # anything: their packs are not padded.
        rules = config.col_scaling, config.icl_scaling
        is_own = cls is TabICL and not any(register.scaling.plugin(rule) for rule in rules)
        if not is_own or config.col_grouping == "disjoint" or any(register.scaling[rule].averages for rule in rules):
            return None
        return mean_size(packs, most_rows, most_features + config.row_num_cls, config.row_num_cls)

    @classmethod
    def padded(cls, config: TabICLConfig, pack: Pack, typical: Size) -> Pack | None:
        """Fill a pack on the CPU up to one of a few sizes; see `Network`."""
        sizes, shapes = TabICL.groups(config, pack)
        num_cls = config.row_num_cls
        rounded = round_up(shapes, typical, num_cls)
        if rounded is None:
            return None
        size, pads = rounded
        exact = totals_of(shapes, num_cls)

        # Pads of columns and of in-context learning are laid out as more tables, after those of the pack. `log_n` has a
        # number for each table and each pad of in-context learning. Columns may have more pads, which share the last.
        last = 2 * size.tables - 1
        with_columns = torch.cat([sizes, torch.tensor(pads.columns, dtype=sizes.dtype).view(-1, 3)])
        with_tables = torch.cat([sizes, torch.tensor(pads.tables, dtype=sizes.dtype)])
        columns = column_layout(with_columns, shapes + pads.columns, config.col_num_inducing)
        columns = columns._replace(
            cells=feature_index(with_columns, shapes, columns, config.col_grouping, config.group_size)
        )
        rows = row_layout(sizes, shapes, num_cls, column_layout(sizes, shapes, config.col_num_inducing))
        layout = Layout(
            pad_columns(columns, last, size),
            pad_rows(rows, exact, size, pads.rows, num_cls),
            pad_context(context_layout(with_tables, shapes + pads.tables), size),
            log_counts(with_tables),
        )
        targets = F.pad(pack.target_positions(), (0, size.totals.query_rows - exact.query_rows))
        return Pack(
            F.pad(pack.X, (0, size.totals.tokens - exact.tokens)),
            F.pad(pack.y, (0, size.totals.rows - exact.rows)),
            pack.sizes,
            pack.shapes,
            FlatLayout.of(layout, targets, size.most_rows),
        )

    def blocks(self) -> Iterator[nn.Module]:
        """Yield the transformer blocks of all stages; see `Network`."""
        for stage in (self.col_embedder.tf_col, self.row_interactor.tf_row, self.icl_predictor.tf_icl):
            yield from stage["blocks"].children()

    def products(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the parameters that are read in 16 bits only; see `Network`."""
        # A subclass may read them otherwise.
        if type(self).forward is not TabICL.forward:
            return
        for stage in (self.col_embedder, self.row_interactor, self.icl_predictor):
            # A stage of a plug-in may be any module.
            if hasattr(stage, "products"):
                yield from stage.products()

    def named_scalings(self) -> Iterator[tuple[str, Scaling | SSA]]:
        """Yield the attention layers that have a scaling rule, by name: `column.0`, ..., `icl.11`."""
        for stage, part in (("column", self.col_embedder.tf_col), ("icl", self.icl_predictor.tf_icl)):
            for i, block in enumerate(part["blocks"].children()):
                for layer in block.modules():
                    if isinstance(layer, Scaling | SSA):  # at most one in each block
                        yield f"{stage}.{i}", layer

    def set_col_attention_fp32(self, fp32: bool | str | None) -> None:
        """Compute column attention in fp32 under autocast, or not; None does as the settings say, "auto" as in a stage.

        A stage of training calls it (`curriculum.stages.NAME.col_attention_fp32`).
        """
        if isinstance(self.col_embedder, ColumnEmbedding):
            self.col_embedder.set_attention_fp32(self.config.col_attention_fp32 if fp32 is None else fp32)
        elif fp32 is not None:
            stage = type(self.col_embedder).__name__
            raise ValueError(f"col_attention_fp32 is {fp32} in a stage; the column stage {stage} has no such setting")

    def biases_without_effect(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield the biases of the keys of columns and of in-context learning; see `Network`.

        They add the same number to all scores of a query, which softmax ignores, whatever the scaling rule. Signed
        averaging depends on them, and so does the row stage, which rotates keys.
        """
        # A variant may use its keys otherwise.
        if type(self) is not TabICL:
            return
        for stage in (self.col_embedder, self.icl_predictor):
            for layer in stage.modules():
                if isinstance(layer, Attention) and not isinstance(layer.ssmax_layer, SSA):
                    yield layer.in_proj_bias, slice(layer.dim, 2 * layer.dim)

    def named_attentions(self) -> Iterator[tuple[str, Attention]]:
        """Yield the layers in which rows are keys: `column.0`, ..., of inducing points, and `icl.0`, ..., of rows."""
        for i, block in enumerate(self.col_embedder.tf_col["blocks"].children()):
            assert isinstance(block, InducedAttention)
            yield f"column.{i}", block.multihead_attn1.attn
        for i, block in enumerate(self.icl_predictor.tf_icl["blocks"].children()):
            assert isinstance(block, Block)
            yield f"icl.{i}", block.attn

    @staticmethod
    def forward_flops(config: TabICLConfig, num_rows: int, train_size: int, num_features: int) -> float:
        """Count the FLOPs of the matrix products of one table's forward pass, 2 per multiply-add."""
        N, n = num_rows, train_size
        return (
            column_flops(config, N, n, num_features)
            + row_flops(config, N, token_groups(config, num_features))
            + icl_flops(config, N, n)
        )

    @staticmethod
    def kept_values(
        config: TabICLConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        """Count what is kept for the backward pass, and the gradients of the largest block or of the quantiles.

        A block that is recomputed counts twice more (measured); see `Network`.
        """
        N = num_rows
        n = train_size
        kept = sum(kept_by_part(config, N, n, num_features, recomputed).values())
        largest = largest_block(config, N, n, num_features)
        return kept + max((3 if recomputed else 1) * largest, quantile_values(config, N - n))

    @classmethod
    def kept_bytes(
        cls, config: TabICLConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool, in_16_bits: bool
    ) -> float:
        """Count the bytes of one table in memory at the peak of the backward pass; arguments as in `Network`.

        Each value takes 4 bytes. Under autocast it takes 2.04, with the statistics of norms and attention, and those
        that stay in float32 take 2 more; both were simulated for packs of TabICLv2 with the operators of a GPU.
        """
        N = num_rows
        n = train_size
        M = num_features
        values = cls.kept_values(config, N, n, M, recomputed)
        if not in_16_bits:
            return 4 * values

        # What `kept_values` adds for the gradients of the largest block, or of the quantiles, is replaced by what was
        # simulated. Without recomputation, that is 0.1 of the block: gradients are small where the backward pass
        # begins, and what in-context learning keeps is freed before it comes to the largest block. With it, 0.9.
        largest = largest_block(config, N, n, M)
        quantiles = quantile_values(config, N - n)
        counted = max((3 if recomputed else 1) * largest, quantiles)
        simulated = max((0.9 if recomputed else 0.1) * largest, quantiles)
        values = values - counted + simulated

        # The simulation leaves out the workspace of flash attention: recomputed, 60,000 rows of 20 features take 8.4 GB
        # in the simulation and 17.0 GB with the workspace; 16.8 GB were measured on an H100.
        workspace = flash_workspace(config, N, M) if recomputed else 0.0
        return 2.04 * values + 2 * float32_values(config, N, n, M, recomputed) + workspace

    @staticmethod
    def encoded_bytes(config: TabICLConfig, train_size: int, num_features: int, num_classes: int) -> float:
        """Count the bytes of what `encode` keeps for a table, in float32."""
        return encoded_bytes(config, train_size, num_features, num_classes)

    @staticmethod
    def embedding_width(config: TabICLConfig) -> int:
        """Return E; see `Network`."""
        return config.embed_dim

    @staticmethod
    def pack_tokens(config: TabICLConfig, num_rows: int, num_features: int) -> int:
        """Count one table against the token budget of a pack.

        These are its tokens in the row stage, and for each row as many tokens as take the memory of the row in
        in-context learning: icl_num_blocks blocks of width D, where a token has col_num_blocks + row_num_blocks of E.
        """
        c = config
        of_row = round(c.icl_num_blocks * c.row_num_cls / (c.col_num_blocks + c.row_num_blocks))
        return num_rows * (token_groups(config, num_features) + c.row_num_cls + of_row)

    def _check(self, pack: Pack) -> None:
        regression = self.config.is_regression
        kind = torch.float32 if regression else torch.int64
        if pack.X.dtype != torch.float32 or pack.y.dtype != kind:
            name = str(kind).removeprefix("torch.")
            raise ValueError(f"X is {pack.X.dtype} and y {pack.y.dtype}; they must be float32 and {name}")
        for N, n, _ in pack.shapes:
            if not 1 <= n < N:
                raise ValueError(f"{n} of {N} rows are labeled; there must be a labeled row and a query row")
        # On a GPU, the host would wait for the labels.
        if regression or pack.y.device.type != "cpu":
            return
        if not 0 <= pack.y.min() <= pack.y.max() < self.config.max_classes:
            raise ValueError(
                f"labels are in {pack.y.min()}..{pack.y.max()}; they must be in 0..{self.config.max_classes - 1}"
            )
