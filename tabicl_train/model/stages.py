"""The three stages of a TabICL: column embedding, row interaction and in-context learning.

N rows, of which the first n are labeled, G feature groups, E embedding, I inducing points, T = row_num_cls + G tokens
of a row, D = row_num_cls * E row representation, C logits or quantiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model.attention import (
    Attention,
    Block,
    KernelRows,
    LayerNorm,
    Rotary,
    RowSpans,
    call_block,
    weights_and_biases,
    widest_row,
)
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.pack import (
    Columns,
    Context,
    Pack,
    Rows,
    Shape,
    WithinRows,
    positions_by_kind,
    row_programs,
    starts_of,
)


class LabelEncoder(nn.Linear):
    """A linear map of the one-hot label, or of a number: ``W onehot(y) + b``, or ``W y + b``.

    TabICLv2 has one for the column stage and one for in-context learning (arXiv 2602.11139, section 3).
    """

    def forward(self, y: Tensor) -> Tensor:
        """Embed labels.

        Parameters
        ----------
        y : Tensor
            Labels, (rows,): int64 in [0, C), or float32 numbers.

        Returns
        -------
        Tensor
            (rows, out_features).
        """
        return exact_linear(label_values(y, self.in_features).to(self.weight.dtype), self.weight, self.bias)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply cells by weights in float32, even under autocast and with TF32 enabled.

    In bf16, 60,000 normal values of a column keep only 2,473 distinct values.

    Parameters
    ----------
    x : Tensor
        Cells, (rows, K); the last columns may be zeros, as padding.
    weight, bias : Tensor
        Of a linear layer.

    Returns
    -------
    Tensor
        (rows, outputs), in the dtype of autocast if it is enabled.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        with without_tf32(x.is_cuda):
            return F.linear(x, weight, bias)
    x = F.pad(x, (0, multiple_of_8(x.shape[1]) - x.shape[1]))
    weight = F.pad(weight, (0, x.shape[1] - weight.shape[1]))
    with torch.autocast(device, enabled=False), without_tf32(x.is_cuda):
        out = F.linear(x, weight, bias)
    return out.to(torch.get_autocast_dtype(device))


def multiple_of_8(width: int) -> int:
    """Return the next multiple of 8, without which CUDA takes kernels for unaligned memory."""
    return -(-width // 8) * 8


@contextmanager
def without_tf32(on_cuda: bool) -> Iterator[None]:
    """Multiply in full precision on CUDA; TF32 would round cells to 10 bits of their fraction."""
    if not on_cuda:
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def label_values(y: Tensor, width: int) -> Tensor:
    """Return classes (rows,) one-hot, (rows, width), or numbers as (rows, 1)."""
    if y.is_floating_point():
        return y[:, None]
    return y[:, None] == torch.arange(width, device=y.device)


class InducedAttention(nn.Module):
    """Induced set attention (ISAB, arXiv 1810.00825, section 3.1): its cost is linear in the rows.

    For the tokens X of a column and I learned inducing points P, ``H = block1(P, X[:n])`` and ``out = block2(X, H)``.
    In `block(queries, keys)` the first attend to the second. Query rows are not in H, so predictions of a row do not
    depend on other query rows.

    Parameters
    ----------
    config : TabICLConfig
        The architecture. P starts with a standard deviation of 0.02, as in the released network.
    """

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.multihead_attn1 = Block(c.embed_dim, c.col_num_heads, c.col_scaling, c, c.col_attention_fp32)
        # Without scaling, since its number of keys is always I.
        self.multihead_attn2 = Block(c.embed_dim, c.col_num_heads, "none", c, c.col_attention_fp32)
        self.ind_vectors = nn.Parameter(torch.empty(c.col_num_inducing, c.embed_dim))
        nn.init.trunc_normal_(self.ind_vectors, std=0.02)

    def forward(self, tokens: Tensor, columns: Columns, log_n: Tensor) -> Tensor:
        """Let the tokens of each column attend to its inducing points, which have attended to its labeled tokens.

        Parameters
        ----------
        tokens : Tensor
            Tokens of all columns, (tokens, E), labeled ones first.
        columns : Columns
            Their layout.
        log_n : Tensor
            Logarithm of the number of labeled rows of each table, (B,).

        Returns
        -------
        Tensor
            (tokens, E).
        """
        labeled = tokens[: columns.labeled]
        hidden = self.multihead_attn1(self.ind_vectors, labeled, columns.to_inducing, log_n)  # (columns * I, E)
        return self.multihead_attn2(tokens, hidden, columns.from_inducing)

    def keys(self, labeled: Tensor, columns: Columns, log_n: Tensor) -> Tensor:
        """Compute the keys and values of `multihead_attn2` from the labeled tokens, (columns * I, 2, H, d)."""
        hidden = self.multihead_attn1(self.ind_vectors, labeled, columns.to_inducing, log_n)  # (columns * I, E)
        return self.multihead_attn2.keys(hidden)


class ColumnEmbedding(nn.Module):
    """The column stage (TabICL, arXiv 2502.05564, section 3.2; TabICLv2, arXiv 2602.11139, section 3).

    A token is a group of features of a row, mapped to width E by ``W x + b``. In a target-aware network, the embedding
    of its label is added to a labeled token. Induced set attention over the rows of a column, several times, makes them
    embeddings of cells, out. With `col_affine`, as in TabICL v1, the embedding of a cell x is
    ``x * norm(W1 out) + norm(W2 out)`` instead.

    Parameters
    ----------
    config : TabICLConfig
        The architecture.
    """

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        self.in_linear = nn.Linear(c.group_size, c.embed_dim)
        self.tf_col = nn.ModuleDict({"blocks": nn.ModuleList(InducedAttention(c) for _ in range(c.col_num_blocks))})
        if c.col_target_aware:
            self.y_encoder = LabelEncoder(c.label_width, c.embed_dim)
        if c.col_affine:
            self.out_w = nn.Linear(c.embed_dim, c.embed_dim)
            self.out_b = nn.Linear(c.embed_dim, c.embed_dim)
            self.ln_w = LayerNorm(c.embed_dim, bias=not c.bias_free_ln)
            self.ln_b = LayerNorm(c.embed_dim, bias=not c.bias_free_ln)

    def forward(self, pack: Pack, columns: Columns, log_n: Tensor, recompute: bool = False) -> Tensor:
        """Compute the embeddings of the cells of all tables.

        Parameters
        ----------
        pack : Pack
            The tables.
        columns : Columns
            The layout of their tokens.
        log_n : Tensor
            Logarithm of the number of labeled rows of each table, (B,).
        recompute : bool, default False
            Whether the backward pass computes the blocks again.

        Returns
        -------
        Tensor
            (tokens, E), in the order of `columns`.
        """
        cells = self.read(pack, columns, pack.y.index_select(0, columns.labels))
        return self.embed(cells, columns, log_n, recompute)

    def set_attention_fp32(self, fp32: bool | str) -> None:
        """Compute attention in fp32 under autocast, or not; "auto": unless the kernels of triton_attention.py run.

        In bf16, flash attention computes the gradient of queries from a rounded output; the kernels do not.
        """
        for block in self.tf_col["blocks"].children():
            assert isinstance(block, InducedAttention)
            for layer in (block.multihead_attn1.attn, block.multihead_attn2.attn):
                layer.fp32 = layer.own_kernels is None if fp32 == "auto" else bool(fp32)

    def products(self) -> Iterator[tuple[nn.Module, str]]:
        """See `Network.products`."""
        if type(self) is not ColumnEmbedding:
            return
        for block in self.tf_col["blocks"].children():
            if type(block) is InducedAttention:
                # Norms of inducing points, and of what becomes of them, compute in float32, as these tokens are.
                yield from block.multihead_attn1.products(norms=())
                yield from block.multihead_attn2.products(norms=("norm2",))
        if self.config.col_affine:
            yield from weights_and_biases(self.out_w, self.out_b, self.ln_w, self.ln_b)

    def read(self, pack: Pack, columns: Columns, labels: Tensor | None) -> Tensor:
        """Return the input of each token, (tokens, K), from labels (labeled tokens,) or None.

        An input has the features of its group; in a target-aware network then the label (see `label_values`) and a 1,
        or zeros for query rows; and under autocast zeros up to a multiple of eight, which the product needs.
        """
        # The features. With the grouping disjoint, the last group may need cells after X.
        c = self.config
        X = pack.X
        if c.col_grouping == "disjoint":
            X = F.pad(X, (0, max(N for N, _, _ in pack.shapes)))
        index = columns.cells
        if index is None:
            index = feature_index(pack.sizes, pack.shapes, columns, c.col_grouping, c.group_size)
        features = X[index]  # (tokens, size)
        if not c.col_target_aware:
            return features
        # The label and the 1, whose weight is the bias of the labels' embedding; see `project`.
        num_features = features.shape[1]
        num_inputs = num_features + c.label_width + 1
        has_padding = torch.is_autocast_enabled(X.device.type)
        cells = X.new_zeros(len(features), multiple_of_8(num_inputs) if has_padding else num_inputs)
        cells[:, :num_features] = features
        if labels is not None:
            cells[: columns.labeled, num_features : num_inputs - 1] = label_values(labels, c.label_width)
            cells[: columns.labeled, num_inputs - 1] = 1
        return cells

    def embed(self, cells: Tensor, columns: Columns, log_n: Tensor, recompute: bool = False) -> Tensor:
        """Compute the embeddings of the cells of some columns, which do not depend on those of others.

        Parameters
        ----------
        cells : Tensor
            The input of each token, from `read`, (tokens, K).
        columns : Columns
            The layout of these tokens.
        log_n : Tensor
            (B,).
        recompute : bool, default False
            Whether the backward pass computes the blocks again.

        Returns
        -------
        Tensor
            (tokens, E).
        """
        tokens = self.project(cells)
        for block in self.tf_col["blocks"].children():
            tokens = call_block(block, tokens, columns, log_n, recompute=recompute)
        return self.finish(tokens, cells)

    def embed_known(
        self, cells: Tensor, columns: Columns, log_n: Tensor, known: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute `embed` of labeled rows and the keys of each block; or of query rows with these keys as `known`.

        Parameters
        ----------
        cells : Tensor
            The input of each token, (tokens, K).
        columns : Columns
            The layout of these tokens.
        log_n : Tensor
            (B,).
        known : list of Tensor, optional
            Keys and values of the inducing points of these columns, for each block (columns * I, 2, H, d).

        Returns
        -------
        tuple of Tensor and list of Tensor
            The embeddings, (tokens, E), and the keys and values of each block.
        """
        tokens = self.project(cells)
        keys_of_blocks = []
        for i, block in enumerate(self.tf_col["blocks"].children()):
            assert isinstance(block, InducedAttention)
            keys = block.keys(tokens, columns, log_n) if known is None else known[i]
            keys_of_blocks.append(keys)
            tokens = block.multihead_attn2(tokens, keys, columns.from_inducing)
        return self.finish(tokens, cells), keys_of_blocks

    def project(self, cells: Tensor) -> Tensor:
        """Cells (tokens, K) -> inputs of the first block, (tokens, E)."""
        weights = [self.in_linear.weight]
        if self.config.col_target_aware:
            weights += [self.y_encoder.weight, self.y_encoder.bias[:, None]]
        # One product for all, since each pass over all tokens is slow.
        weight = torch.cat(weights, dim=1)  # (E, K)
        return exact_linear(cells, weight, self.in_linear.bias)

    def finish(self, tokens: Tensor, cells: Tensor) -> Tensor:
        """Turn the output of the last block into embeddings of cells, (tokens, E)."""
        if self.config.col_affine:
            weight = self.ln_w(self.out_w(tokens))
            bias = self.ln_b(self.out_b(tokens))
            # Under autocast, cells are float32.
            tokens = (cells[:, :1] * weight + bias).to(weight.dtype)
        return tokens


def feature_index(sizes: Tensor, shapes: Iterable[Shape], columns: Columns, grouping: str, size: int) -> Tensor:
    """Return the cells that each token sees, as positions in `Pack.X`, (tokens, size).

    The grouping is one of

    - none: one feature per token, G = M;
    - circular: token j sees features j + 1, j + 2, j + 4, ... modulo M, G = M (arXiv 2602.11139);
    - disjoint: neighbors in groups of `size`, G = ceil(M / size); the last group is padded by cells after X.
    """
    table = columns.table
    N, n, M = sizes.unbind(1)
    first_of_table = starts_of(N * M)[table, None]  # (columns, 1), its first cell
    rows = N[table]  # (columns,)
    num_features = M[table, None]  # (columns, 1)
    number = torch.arange(size, device=sizes.device)
    if grouping == "circular":
        features = (columns.group[:, None] + 2**number) % num_features  # (columns, size)
    else:
        features = columns.group[:, None] * size + number
    # The cells of these features in the first row; the cell in the next row lies one further.
    first = first_of_table + features * rows[:, None]  # (columns, size)
    if grouping == "disjoint":
        num_cells = sum(N * M for N, _, M in shapes)
        first = torch.where(features < num_features, first, num_cells)
    return positions_by_kind(first, 1, rows, n[table], columns.from_inducing.queries, columns.labeled)


class Merge(torch.autograd.Function):
    """Merges two sets of tokens at given positions; the rules of autograd would copy all tokens twice."""

    @staticmethod
    def forward(ctx, tokens: Tensor, positions: Tensor, others: Tensor, other_positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions, other_positions)
        merged = tokens.new_empty(len(tokens) + len(others), tokens.shape[1])
        return merged.index_copy_(0, positions, tokens).index_copy_(0, other_positions, others)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        positions, other_positions = ctx.saved_tensors
        return grad.index_select(0, positions), None, grad.index_select(0, other_positions), None


def products_of_blocks(blocks: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters of rows' and in-context learning's blocks that are read in 16 bits only."""
    *others, last = blocks.children()
    for block in others:
        if isinstance(block, Block):
            yield from block.products()
    if isinstance(last, Block):
        # norm1 is applied to queries and to keys, and casts its weights each time: the two gradients are added in
        # float32, those of one copy would be in 16 bits.
        yield from last.products(norms=("norm2",))


class RowInteraction(nn.Module):
    """The row stage of TabICL (arXiv 2502.05564, section 3): a transformer over the tokens of each row.

    Learned CLS tokens stand before the G embeddings of a row's cells. After blocks with rotary embedding, the outputs
    of the CLS tokens, one after the other, are the representation of the row,
    ``concatenate(norm(cls_1), norm(cls_2), ...)``, of width D = row_num_cls E.

    Parameters
    ----------
    config : TabICLConfig
        The architecture. CLS tokens start with a standard deviation of 0.02, as in the released network.
    """

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        blocks = (Block(c.embed_dim, c.row_num_heads, "none", c) for _ in range(c.row_num_blocks))
        rope = Rotary(c.embed_dim // c.row_num_heads, c.row_rope_base, c.row_rope_interleaved)
        self.tf_row = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "rope": rope})
        self.cls_tokens = nn.Parameter(torch.empty(c.row_num_cls, c.embed_dim))
        self.out_ln = LayerNorm(c.embed_dim, bias=not c.bias_free_ln)
        nn.init.trunc_normal_(self.cls_tokens, std=0.02)

    def products(self) -> Iterator[tuple[nn.Module, str]]:
        """See `Network.products`."""
        if type(self) is not RowInteraction:
            return
        yield from products_of_blocks(self.tf_row["blocks"])
        yield from weights_and_biases(self.out_ln)

    def forward(self, tokens: Tensor, rows: Rows, recompute: bool = False) -> Tensor:
        """Compute the representations of all rows.

        Parameters
        ----------
        tokens : Tensor
            Embeddings of all cells, (tokens, E), in the order of the column stage.
        rows : Rows
            The layout of the rows.
        recompute : bool, default False
            Whether the backward pass computes the blocks again.

        Returns
        -------
        Tensor
            (rows, D), in the order of `rows`.
        """
        return self.interact(self.add_cls(tokens, rows), rows.within, recompute)

    def add_cls(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Put the CLS tokens of each row before the tokens of its cells, (rows * T, E)."""
        cls_tokens = self.cls_tokens.to(tokens.dtype).repeat(len(rows.order), 1)  # (rows * row_num_cls, E)
        return Merge.apply(tokens, rows.tokens.long(), cls_tokens, rows.within.cls.long())

    def interact(self, x: Tensor, within: WithinRows, recompute: bool = False) -> Tensor:
        """Compute the representations of rows from all of their tokens.

        Parameters
        ----------
        x : Tensor
            Tokens, (rows * T, E), the CLS tokens of each row first.
        within : WithinRows
            The layout of these rows.
        recompute : bool, default False
            Whether the backward pass computes the blocks again.

        Returns
        -------
        Tensor
            (rows, D).
        """
        # What attention within rows is computed from: by kernels, which rotate tokens themselves, or by PyTorch.
        interleaved = self.config.row_rope_interleaved
        cos, sin = self.tf_row["rope"](within.every.most_keys)  # of each position
        every: RowSpans | KernelRows
        collecting: RowSpans | KernelRows
        if self.takes_kernels(x, within):
            programs = within.programs
            if programs is None:
                assert isinstance(within.every.runs, Tensor)  # not exported
                programs = row_programs(within.every.runs, x.device)
            every = KernelRows(cos, sin, *programs, 0, interleaved)
            collecting = KernelRows(cos, sin, *programs, self.config.row_num_cls, interleaved)
        else:
            cos = cos.index_select(0, within.position)[:, None]  # of each token, (rows * T, 1, head_dim)
            sin = sin.index_select(0, within.position)[:, None]
            rotation = cos, sin
            of_cls = cos.index_select(0, within.cls), sin.index_select(0, within.cls)
            every = RowSpans(within.every, rotation, rotation, interleaved)
            collecting = RowSpans(within.collecting, of_cls, rotation, interleaved)

        *blocks, last = self.tf_row["blocks"].children()
        for block in blocks:
            x = call_block(block, x, None, every, recompute=recompute)
        # The last block computes CLS tokens only, since other tokens are not read after it.
        cls_tokens = x.index_select(0, within.cls)  # (rows * row_num_cls, E)
        cls_tokens = call_block(last, cls_tokens, x, collecting, recompute=recompute)
        return self.out_ln(cls_tokens).view(-1, self.config.row_dim)

    def takes_kernels(self, x: Tensor, within: WithinRows) -> bool:
        """Whether the kernels of triton_attention.py compute all blocks."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        for block in self.tf_row["blocks"].children():
            # The blocks of a plug-in may lack what ours have.
            if type(block) is not Block or type(block.attn) is not Attention:
                return False
            if not block.attn.takes_kernels(x.device, dtype):
                return False
        return within.every.most_keys <= widest_row(self.config.embed_dim // self.config.row_num_heads)


class InContextLearner(nn.Module):
    """The in-context stage of TabICL (arXiv 2502.05564, section 3): a transformer over the rows of a table.

    To the representation r of a labeled row, the embedding of its label is added: ``r + W onehot(y) + b``. In each
    block, all rows attend to the labeled rows of their table only. A query row becomes
    ``W2 gelu(W1 norm(r) + b1) + b2``, logits or quantiles, with a hidden width of 2 D.

    Parameters
    ----------
    config : TabICLConfig
        The architecture.
    """

    def __init__(self, config: TabICLConfig):
        super().__init__()
        c = config
        self.config = c
        blocks = (Block(c.row_dim, c.icl_num_heads, c.icl_scaling, c) for _ in range(c.icl_num_blocks))
        self.tf_icl = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.ln = LayerNorm(c.row_dim, bias=not c.bias_free_ln)
        self.y_encoder = LabelEncoder(c.label_width, c.row_dim)
        self.decoder = nn.Sequential(
            nn.Linear(c.row_dim, 2 * c.row_dim), nn.GELU(), nn.Linear(2 * c.row_dim, c.outputs)
        )

    def products(self) -> Iterator[tuple[nn.Module, str]]:
        """See `Network.products`."""
        if type(self) is not InContextLearner:
            return
        yield from products_of_blocks(self.tf_icl["blocks"])
        layers = self.decoder.children() if type(self.decoder) is nn.Sequential else ()
        yield from weights_and_biases(self.ln, *layers)

    def forward(self, rows: Tensor, y: Tensor, context: Context, log_n: Tensor, recompute: bool = False) -> Tensor:
        """Predict the query rows.

        Parameters
        ----------
        rows : Tensor
            Representations of all rows, (rows, D), in the order of `context`, labeled ones first.
        y : Tensor
            Labels of the labeled rows, (labeled rows,).
        context : Context
            The layout of the rows.
        log_n, recompute
            As in `ColumnEmbedding.forward`.

        Returns
        -------
        Tensor
            (query rows, C).
        """
        n = context.labeled
        rows = torch.cat([rows[:n] + self.y_encoder(y), rows[n:]])  # (rows, D)
        *blocks, last = self.tf_icl["blocks"].children()
        # Labeled rows, the first n, are the keys; all rows are queries.
        for block in blocks:
            rows = call_block(block, rows, n, context.all, log_n, context.table, recompute=recompute)
        # The last block computes query rows only, since labeled rows are not read after it.
        queries = call_block(last, rows[n:], rows[:n], context.queries, log_n, context.table[n:], recompute=recompute)
        return self.decoder(self.ln(queries))

    def keys(self, rows: Tensor, y: Tensor, context: Context, log_n: Tensor) -> list[Tensor]:
        """Compute the keys and values of labeled rows in each block.

        Parameters
        ----------
        rows : Tensor
            Representations of labeled rows, (rows, D).
        y : Tensor
            Their labels, (rows,).
        context : Context
            A layout in which they are labeled rows and query rows of the same tables.
        log_n : Tensor
            (B,).

        Returns
        -------
        list of Tensor
            (rows, 2, H, d) for each block.
        """
        rows = rows + self.y_encoder(y)
        table = context.table[context.labeled :]
        keys_of_blocks = []
        for number, block in enumerate(self.tf_icl["blocks"].children(), 1):
            assert isinstance(block, Block)
            keys = block.keys(rows)
            keys_of_blocks.append(keys)
            # Labeled rows are not read after the last block.
            if number < self.config.icl_num_blocks:
                rows = block(rows, keys, context.queries, log_n, table)
        return keys_of_blocks

    def answer(self, queries: Tensor, keys: list[Tensor], context: Context, log_n: Tensor) -> Tensor:
        """Predict query rows with the keys of labeled rows.

        Parameters
        ----------
        queries : Tensor
            Representations of query rows, (query rows, D).
        keys : list of Tensor
            From `keys`, (labeled rows, 2, H, d) for each block.
        context : Context
            The layout of the query rows and of the labeled rows.
        log_n : Tensor
            (B,).

        Returns
        -------
        Tensor
            (query rows, C).
        """
        table = context.table[context.labeled :]
        for block, keys_of_block in zip(self.tf_icl["blocks"].children(), keys, strict=True):
            queries = block(queries, keys_of_block, context.queries, log_n, table)
        return self.decoder(self.ln(queries))
