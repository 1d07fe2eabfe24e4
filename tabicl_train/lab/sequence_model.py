"""A decoder-only transformer over sequences of numbers and labels, for the in-context tasks of the SSA paper.

A table is one prompt x_1, y_1, x_2, y_2, ... (arXiv 2508.14685): a token for each number of a row, then one for its
label. Every row is a query row: its label is predicted at the last of its numbers, from the rows before it. Therefore
the number of labeled rows has no effect, and a sequence of 40 rows trains all lengths from 1 to 40.

Shapes: B tables, N rows, M features, T = N (M + 1) tokens of a table, E width, C logits, or one number.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from priors.options import check
from tabicl_train import register
from tabicl_train.errors import ConfigError
from tabicl_train.lab.causal import CausalBlock, CausalSpans
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.model.attention import LayerNorm, call_block
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.model.scaling import SSA, Scaling
from tabicl_train.model.stages import LabelEncoder

POSITION_STD = 0.02  # of the initial position embeddings, as in GPT-2


class SequenceModel(Network):
    """A causal transformer that predicts the label of every row from the rows before it (arXiv 2508.14685).

    The token at position t is x u + p_t for a number x, which keeps the order of numbers, and L y + p_t for a label y,
    with learned vectors u and p_t and a learned linear map L. Causal blocks, a LayerNorm and a linear layer follow.

    Parameters
    ----------
    config : SequenceConfig
        The settings.

    Raises
    ------
    ValueError
        With every problem of the settings.
    """

    predicts_quantiles = False
    predicts_real_tables = False
    parts = {"embedding": "embedding", "blocks": "transformer", "head": "head"}

    def __init__(self, config: SequenceConfig):
        super().__init__(config)
        problems = check(config)
        if problems:
            raise ValueError("This model cannot be built: " + "; ".join(problems))
        c = self.config = config
        # The order of construction determines the initial weights for a seed.
        labels = LabelEncoder(1 if c.is_regression else c.max_classes, c.width)
        positions = nn.Embedding(c.max_tokens, c.width)
        nn.init.normal_(positions.weight, std=POSITION_STD)
        numbers = nn.Linear(1, c.width, bias=False)
        self.embedding = nn.ModuleDict({"number": numbers, "label": labels, "position": positions})
        self.transformer = nn.ModuleList(CausalBlock(c.width, c.num_heads, c.scaling, c) for _ in range(c.num_blocks))
        self.head = nn.Sequential(LayerNorm(c.width), nn.Linear(c.width, c.outputs))

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predict the rows of all tables, one table after the other.

        Parameters
        ----------
        pack : Pack
            The tables. A label is used only for the rows after it.
        checkpoint_rows : int, optional
            Recompute activations of packs with a longer table. Default: that of the settings.

        Returns
        -------
        Tensor
            Logits (rows, C), or numbers (rows, 1).

        Raises
        ------
        ValueError
            If a table is too long, or has other dtypes.
        """
        # Adjacent tables with the same N and M are one run of sequences.
        self._check(pack)
        limit = self.config.checkpoint_rows if checkpoint_rows is None else checkpoint_rows
        recompute = 0 < limit < max(N for N, _, _ in pack.shapes)
        groups = []
        for (N, M), tables in groupby((N, M) for N, _, M in pack.shapes):
            groups.append((len(list(tables)), N, M))
        tokens = self.embed(pack, groups)  # (tokens of all tables, E)
        spans = CausalSpans([(count, N * (M + 1)) for count, N, M in groups])
        for block in self.transformer:
            tokens = call_block(block, tokens, None, spans, recompute=recompute)

        # A row is predicted from its last number, the token before its label.
        parts = tokens.split([count * T for count, T in spans.runs])
        last_numbers = []
        for (_, _, M), part in zip(groups, parts, strict=True):
            rows = part.unflatten(0, (-1, M + 1))  # (rows, M + 1, E)
            last_numbers.append(rows[:, M - 1])
        return self.head(torch.cat(last_numbers))

    def embed(self, pack: Pack, groups: list[tuple[int, int, int]]) -> Tensor:
        """Embed the tokens of all tables.

        Parameters
        ----------
        pack : Pack
            The tables.
        groups : list of (int, int, int)
            Number of adjacent tables with the same N and M, N, and M.

        Returns
        -------
        Tensor
            (tokens of all tables, E)
        """
        cells = self.embedding["number"](pack.X[:, None]).split([count * N * M for count, N, M in groups])
        labels = self.embedding["label"](pack.y).split([count * N for count, N, _ in groups])
        tokens = []
        for (count, N, M), x, y in zip(groups, cells, labels, strict=True):
            rows = x.view(count, M, N, -1).transpose(1, 2)  # (count, N, M, E)
            grid = torch.cat([rows, y.view(count, N, 1, -1)], 2).flatten(1, 2)  # (count, T, E)
            position = self.embedding["position"](torch.arange(grid.shape[1], device=grid.device))  # (T, E)
            tokens.append((grid + position).flatten(0, 1))
        return torch.cat(tokens)

    def row_losses(self, predictions: Tensor, pack: Pack) -> Tensor:
        """Compute the cross entropy of logits (rows, C), or the squared error of numbers (rows, 1), float32 (rows,)."""
        if self.config.is_regression:
            return (predictions[:, 0].float() - self.targets(pack)).square()
        return F.cross_entropy(predictions.float(), self.targets(pack), reduction="none")

    def targets(self, pack: Pack) -> Tensor:
        return pack.y

    def means(self, values: Tensor, pack: Pack) -> Tensor:
        return pack.row_means(values)

    @staticmethod
    def guess_loss(y: Tensor, train_size: int) -> float:
        """Compute the loss of predicting each row from the labels before it, by their mean or their frequencies.

        The mean of no labels is 0. A class with k of the i labels before gets the probability (k + 1) / (i + C).

        Parameters
        ----------
        y : Tensor
            The labels of a table, (N,).
        train_size : int
            Number of labeled rows, which has no effect.

        Returns
        -------
        float
            The mean over all rows.
        """
        before = torch.arange(len(y))
        if y.is_floating_point():
            means = (y.double().cumsum(0) - y) / before.clamp(min=1)
            return (y - means).square().mean().item()
        classes = y.unique(return_inverse=True)[1]
        counts = F.one_hot(classes).cumsum(0)
        count = counts.gather(1, classes[:, None])[:, 0]  # k + 1, since it includes the row's own label
        return -(count / (before + counts.shape[1])).log().mean().item()

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether Muon optimizes a parameter: the matrices of the blocks, without those of scaling rules."""
        return parameter.ndim == 2 and name.startswith("transformer.") and "ssmax" not in name

    def named_scalings(self) -> Iterator[tuple[str, Scaling | SSA]]:
        """Yield the layers with signed averaging: `block.0`, `block.1`, ..."""
        for i, block in enumerate(self.transformer):
            for layer in block.modules():
                if isinstance(layer, SSA):
                    yield f"block.{i}", layer

    @staticmethod
    def forward_flops(config: SequenceConfig, num_rows: int, train_size: int, num_features: int) -> float:
        c = config
        T = num_rows * (num_features + 1)  # tokens
        block = 2 * T * c.width**2 * (4 + 2 * c.ff_factor) + 4 * T * T * c.width
        label = 1 if c.is_regression else c.max_classes
        return c.num_blocks * block + 2 * num_rows * c.width * (num_features + label + c.outputs)

    @staticmethod
    def kept_values(
        config: SequenceConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        # For each token, a block keeps seven vectors and 2 + 2 ff_factor for its feed-forward network. Signed averaging
        # keeps the queries once more, and 2.5 values for each score, or 3.5 if the exponent is learned (measured).
        c = config
        T = num_rows * (num_features + 1)  # tokens
        vectors = 7
        if c.ff_factor:
            vectors += 2 + 2 * c.ff_factor
        block: float = T * c.width * vectors
        if register.scaling[c.scaling].averages:
            values_per_score = 2.5 if c.scaling == "ssa" else 3.5
            block += T * c.width + values_per_score * c.num_heads * T * T
        if recomputed:  # the inputs of all blocks, and what recomputing one of them needs
            return c.num_blocks * (T * c.width) + 3 * block + 2 * T * c.width
        return c.num_blocks * block + block + 2 * T * c.width

    @staticmethod
    def pack_tokens(config: SequenceConfig, num_rows: int, num_features: int) -> int:
        return num_rows * (num_features + 1)

    @staticmethod
    def size_problem(config: SequenceConfig, num_rows: int, num_features: int) -> str | None:
        T = num_rows * (num_features + 1)
        if T <= config.max_tokens:
            return None
        table = f"{num_rows} rows of {num_features} numbers and a label"
        return f"{table} are {T} tokens, more than model.max_tokens={config.max_tokens}"

    @staticmethod
    def to_public(config: SequenceConfig) -> dict[str, Any]:
        raise ConfigError(["the public format has no networks over sequences; format=hub can express them"])

    def _check(self, pack: Pack) -> None:
        kind = torch.float32 if self.config.is_regression else torch.int64
        if pack.X.dtype != torch.float32 or pack.y.dtype != kind:
            name = str(kind).removeprefix("torch.")
            raise ValueError(f"X is {pack.X.dtype} and y {pack.y.dtype}; they must be float32 and {name}")
        for N, _, M in pack.shapes:
            problem = self.size_problem(self.config, N, M)
            if problem:
                raise ValueError(problem)
