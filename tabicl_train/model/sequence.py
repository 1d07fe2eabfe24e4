"""A decoder-only transformer over sequences of numbers and answers, for the in-context tasks of the SSA paper.

A table is one prompt x_1, y_1, x_2, y_2, ... (arXiv 2508.14685): a token for each number of a row, then one for its
label. Every row is a query row: its label is predicted at the last of its numbers, from the rows before it. So the
number of labeled rows has no effect, and a sequence of 40 rows trains all lengths from 1 to 40.

B tables, N rows, M features, T = N (M + 1) tokens of a table, E width, C logits, or one number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.errors import ConfigError
from tabicl_train.model.attention import Block, CausalSpans, LayerNorm, run
from tabicl_train.model.column import LabelEncoder
from tabicl_train.model.config import SSA as SSA_RULES
from tabicl_train.model.family import Network
from tabicl_train.model.kernels.linear import Linear
from tabicl_train.model.pack import Pack
from tabicl_train.model.scaling import SSA, Scaling

RULES = ("none", *SSA_RULES)
POSITION_STD = 0.02  # of the first position embeddings, as in GPT-2


@dataclass
class SequenceConfig:
    """Architecture of a transformer over sequences. The defaults are the network of the SSA paper (arXiv 2508.14685)
    with softmax: 12 layers, 8 heads and width 256, as in GPT-2."""

    family: str = "sequence"
    """The family of the network, which tells its settings from those of a TabICL."""
    max_classes: int = 2
    """Number of logits, 2..10; 0 is regression: the number itself is predicted, and its squared error is the loss."""
    num_blocks: int = 12
    """Transformer blocks."""
    num_heads: int = 8
    """Attention heads of a block."""
    width: int = 256
    """Width of a token."""
    ff_factor: int = 4
    """Width of the feed-forward networks as a multiple of the width of a token; 0 leaves them out."""
    scaling: str = "none"
    """Scores of attention: none (softmax), or scaled signed averaging with a fixed exponent (ssa) or one that each head
    learns (ssa_trainable)."""
    ssa_exponent: float = 1.5
    """Exponent of ssa, or the first one of ssa_trainable; above 1. The paper took 1.1, 1.5 and 2."""
    max_tokens: int = 512
    """Longest sequence, in numbers and labels together: each position has an embedding of its own."""
    dropout: float = 0.0
    """Dropout rate, in [0, 1)."""
    checkpoint_rows: int = 20_000
    """Recompute activations in the backward pass of packs with a longer table than this; 0 never recomputes."""

    @property
    def missing_values(self) -> bool:
        return False

    @property
    def is_regression(self) -> bool:
        return self.max_classes == 0

    @property
    def outputs(self) -> int:
        """Values predicted for a row: logits, or the number."""
        return 1 if self.is_regression else self.max_classes

    def problems(self) -> list[str]:
        """Every contradiction among the settings, one sentence each; empty if the network can be built."""
        problems = []
        if self.family != "sequence":
            problems.append(f"family is {self.family!r}; it cannot be changed, choose another model instead")
        for name in ("num_blocks", "num_heads", "width", "max_tokens"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("ff_factor", "checkpoint_rows"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)}, must be at least 0")
        if self.max_classes != 0 and not 2 <= self.max_classes <= 10:
            problems.append(f"max_classes is {self.max_classes}, must be between 2 and 10, or 0 for regression")
        if self.num_heads >= 1 and self.width % self.num_heads:
            problems.append(f"width ({self.width}) is not divisible by num_heads ({self.num_heads})")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}, must be at least 0 and below 1")
        if self.scaling not in RULES:
            problems.append(f"scaling is {self.scaling!r}, must be one of {', '.join(RULES)}")
        if self.scaling in SSA_RULES and self.dropout > 0:
            problems.append(f"scaling is {self.scaling}, which needs dropout=0; it is {self.dropout}")
        if not 1 < self.ssa_exponent < math.inf:
            problems.append(f"ssa_exponent is {self.ssa_exponent}, must be above 1")
        elif self.ssa_exponent != type(self).ssa_exponent and self.scaling not in SSA_RULES:
            problems.append(f"ssa_exponent has no effect, since scaling is {self.scaling}")
        return problems


class SequenceModel(Network):
    """A causal transformer that predicts the label of every row from the rows before it.

    A number x is embedded as x times a vector, which keeps the order of numbers, a label by a linear map of its own,
    and positions by learned vectors. Raises ValueError with every problem of the configuration.
    """

    parts = {"embedding": "embedding", "blocks": "transformer", "head": "head"}

    def __init__(self, config: SequenceConfig):
        super().__init__(config)
        if problems := config.problems():
            raise ValueError("This model cannot be built: " + "; ".join(problems))
        c = self.config = config
        labels = LabelEncoder(1 if c.is_regression else c.max_classes, c.width)
        positions = nn.Embedding(c.max_tokens, c.width)
        nn.init.normal_(positions.weight, std=POSITION_STD)
        parts = {"number": Linear(1, c.width, bias=False), "label": labels, "position": positions}
        self.embedding = nn.ModuleDict(parts)
        rest = (c.ff_factor, c.scaling, c.dropout, False, False, None, False, c.ssa_exponent)
        self.transformer = nn.ModuleList(Block(c.width, c.num_heads, *rest) for _ in range(c.num_blocks))
        self.head = nn.Sequential(LayerNorm(c.width), Linear(c.width, c.outputs))

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        """Predictions for the rows of all tables, one table after the other, (rows, C) or (rows, 1).

        The label of a row is read for the rows after it. checkpoint_rows: as in the settings, which are the default
        Raises ValueError for tables that are too long, and for other dtypes.
        """
        self._check(pack)
        limit = self.config.checkpoint_rows if checkpoint_rows is None else checkpoint_rows
        recompute = 0 < limit < max(N for N, _, _ in pack.shapes)
        groups = [(len(list(same)), *shape) for shape, same in groupby((N, M) for N, _, M in pack.shapes)]
        tokens = self.embed(pack, groups)  # (tokens of all tables, E)
        spans = CausalSpans([(count, N * (M + 1)) for count, N, M in groups])
        for block in self.transformer:
            tokens = run(block, tokens, None, spans, recompute=recompute)
        parts = tokens.split([count * T for count, T in spans.runs])
        last = [part.unflatten(0, (-1, M + 1))[:, M - 1] for (_, _, M), part in zip(groups, parts, strict=True)]
        return self.head(torch.cat(last))

    def embed(self, pack: Pack, groups: list[tuple[int, int, int]]) -> Tensor:
        """The tokens of all tables, (tokens, E); groups: how many tables follow each other of the same N and M."""
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
        """Cross entropy of logits (rows, C), or squared error of numbers (rows, 1), (rows,) float32."""
        if self.config.is_regression:
            return (predictions[:, 0].float() - self.targets(pack)).square()
        return F.cross_entropy(predictions.float(), self.targets(pack), reduction="none")

    def targets(self, pack: Pack) -> Tensor:
        return pack.y

    def means(self, values: Tensor, pack: Pack) -> Tensor:
        return pack.row_means(values)

    @staticmethod
    def guess_loss(y: Tensor, train_size: int) -> float:
        """The loss of a table if each row is guessed from the labels before it: from their mean, 0 at first, or from
        their frequencies. A class that k of i labels have has the probability (k + 1) / (i + C) among C classes."""
        before = torch.arange(len(y))
        if y.is_floating_point():
            means = (y.double().cumsum(0) - y) / before.clamp(min=1)
            return (y - means).square().mean().item()
        classes = y.unique(return_inverse=True)[1]
        counts = F.one_hot(classes).cumsum(0)
        own = counts.gather(1, classes[:, None])[:, 0]  # with the row's own label, k + 1
        return -(own / (before + counts.shape[1])).log().mean().item()

    def named_scalings(self) -> Iterator[tuple[str, Scaling | SSA]]:
        """The layers with signed averaging: `block.0`, `block.1`, ..."""
        for i, block in enumerate(self.transformer):
            yield from ((f"block.{i}", layer) for layer in block.modules() if isinstance(layer, SSA))

    @staticmethod
    def forward_flops(config: SequenceConfig, num_rows: int, train_size: int, num_features: int) -> float:
        c, T = config, num_rows * (num_features + 1)
        block = 2 * T * c.width**2 * (4 + 2 * c.ff_factor) + 4 * T * T * c.width
        label = 1 if c.is_regression else c.max_classes
        return c.num_blocks * block + 2 * num_rows * c.width * (num_features + label + c.outputs)

    @staticmethod
    def kept_values(
        config: SequenceConfig, num_rows: int, train_size: int, num_features: int, recomputed: bool = False
    ) -> float:
        """Of each token a block keeps seven vectors and 2 + 2 ff_factor for its feed-forward network; signed averaging
        keeps the queries once more, and 2.5 values for each score, or 3.5 to learn the exponent (measured)."""
        c, T = config, num_rows * (num_features + 1)
        block: float = T * c.width * (7 + (2 + 2 * c.ff_factor if c.ff_factor else 0))
        if c.scaling in SSA_RULES:
            block += T * c.width + (2.5 if c.scaling == "ssa" else 3.5) * c.num_heads * T * T
        kept = c.num_blocks * (T * c.width if recomputed else block)
        return kept + (3 if recomputed else 1) * block + 2 * T * c.width

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
            raise ValueError(f"X must be float32 and labels {name}, are {pack.X.dtype} and {pack.y.dtype}")
        for N, _, M in pack.shapes:
            if problem := self.size_problem(self.config, N, M):
                raise ValueError(problem)
