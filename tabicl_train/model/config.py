"""The settings of a TabICL network. One dataclass builds it, is saved in checkpoints and is translated for export."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tabicl_train.model.tabicl import TabICL

SCALINGS = ("none", "ssmax", "ssmax_mlp", "ssmax_mlp_elementwise", "qassmax", "qassmax_elementwise")
GROUPINGS = ("none", "circular", "disjoint")
COUNTS = (
    *("embed_dim", "col_num_blocks", "col_num_heads", "col_num_inducing", "col_group_size"),
    *("row_num_blocks", "row_num_heads", "row_num_cls", "icl_num_blocks", "icl_num_heads", "ff_factor"),
)
SCALING_HIDDEN = 64  # hidden width of the scalable softmax's MLPs, that of the released weights


@dataclass
class TabICLConfig:
    """Architecture of the classifier. The defaults are TabICLv2 (arXiv 2602.11139); `v1()` is TabICL (2502.05564).

    It implements `NetworkConfig` (model/family.py). Methods import what they need only when they are called: torch
    takes 2 s, and configuration errors are reported before that.
    """

    max_classes: int = 10
    """Most classes of a training table, and outputs of the network."""

    embed_dim: int = 128
    """E, the width of a cell's embedding; a row representation has D = row_num_cls * E values."""

    col_num_blocks: int = 3
    """Set transformer blocks of the column embedding."""

    col_num_heads: int = 8
    """Attention heads of the column embedding; they must divide embed_dim."""

    col_num_inducing: int = 128
    """Inducing points of each set transformer block."""

    col_affine: bool = False
    """Let the set transformer yield a weight and a bias for each cell, as in v1, instead of its embedding."""

    col_grouping: str = "circular"
    """Which features a column token sees: none (one feature), circular (shifted by powers of two), or disjoint."""

    col_group_size: int = 3
    """Features that a column token sees; no effect with col_grouping=none."""

    col_target_aware: bool = True
    """Add label embeddings to the labelled rows before the set transformer."""

    col_scaling: str = "qassmax_elementwise"
    """Scalable softmax of the inducing points: none, ssmax, ssmax_mlp or qassmax, the last two also _elementwise."""

    row_num_blocks: int = 3
    """Transformer blocks of the row interaction."""

    row_num_heads: int = 8
    """Attention heads of the row interaction; embed_dim / row_num_heads must be even for rotary embedding."""

    row_num_cls: int = 4
    """CLS tokens that collect a row."""

    row_rope_base: float = 100_000.0
    """Base of the rotary position embedding over the features of a row."""

    row_rope_interleaved: bool = False
    """Rotate the pairs (2i, 2i+1), as in v1, instead of (i, i + head_dim/2)."""

    icl_num_blocks: int = 12
    """Transformer blocks of the in-context learner."""

    icl_num_heads: int = 8
    """Attention heads of the in-context learner; they must divide row_num_cls * embed_dim."""

    icl_scaling: str = "qassmax_elementwise"
    """Scalable softmax of the in-context learner; the choices are those of col_scaling."""

    scaling_bound: float | None = None
    """Keep the base multipliers of the scalable softmax within +-bound, smoothly; the public format has no bound."""

    ff_factor: int = 2
    """Hidden width of the feed-forward networks, as a multiple of the width of their block."""

    dropout: float = 0.0
    """Dropout probability in attention and feed-forward networks."""

    bias_free_ln: bool = False
    """Use LayerNorm without a bias."""

    zero_init: bool = False
    """Start the attention output and the second feed-forward matrix at zero, as in v1."""

    col_attention_fp32: bool = False
    """Run column attention in fp32 whatever the precision, as in the published one-GPU run."""

    checkpoint_rows: int = 20_000
    """Recompute activations in the backward pass of tables with more rows than this; 0 = never."""

    @classmethod
    def v1(cls) -> "TabICLConfig":
        return cls(
            col_num_heads=4,
            col_affine=True,
            col_grouping="none",
            col_target_aware=False,
            col_scaling="none",
            row_rope_interleaved=True,
            icl_num_heads=4,
            icl_scaling="none",
            zero_init=True,
        )

    @property
    def row_dim(self) -> int:
        """D, the width of a row representation and of the in-context learner."""
        return self.row_num_cls * self.embed_dim

    @property
    def group_size(self) -> int:
        """Features that one column token sees."""
        return 1 if self.col_grouping == "none" else self.col_group_size

    def build(self) -> "TabICL":
        from tabicl_train.model.tabicl import TabICL

        return TabICL(self)

    def forward_flops(self, num_rows: int, train_size: int, num_features: int) -> float:
        """FLOPs of one table's forward pass; the backward pass takes twice as many."""
        from tabicl_train.model.cost import forward_flops

        return forward_flops(self, num_rows, train_size, num_features)

    def kept_values(self, num_rows: int, train_size: int, num_features: int) -> float:
        """Values of one table in memory at the start of the backward pass."""
        from tabicl_train.model.cost import kept_values

        return kept_values(self, num_rows, train_size, num_features)

    def to_public(self) -> dict[str, Any]:
        """The public client's configuration of the same network; raises ConfigError if it has none."""
        from tabicl_train.model.public_config import to_public

        return to_public(self)

    def problems(self) -> list[str]:
        """Every contradiction among the settings, one sentence each; empty if the network can be built."""
        problems = []
        for name in COUNTS:
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, must be at least 1")
        if not 2 <= self.max_classes <= 10:
            problems.append(f"max_classes is {self.max_classes}, must be between 2 and 10")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}, must be at least 0 and below 1")
        if not self.row_rope_base > 0:
            problems.append(f"row_rope_base is {self.row_rope_base}, must be above 0")
        if self.checkpoint_rows < 0:
            problems.append(f"checkpoint_rows is {self.checkpoint_rows}, must be 0 (never) or a number of rows")
        for name, choices in (("col_grouping", GROUPINGS), ("col_scaling", SCALINGS), ("icl_scaling", SCALINGS)):
            if getattr(self, name) not in choices:
                problems.append(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(choices)}")
        if self.scaling_bound is not None and not self.scaling_bound > 0:
            problems.append(f"scaling_bound is {self.scaling_bound}, must be above 0")
        if self.scaling_bound is not None and self.col_scaling == self.icl_scaling == "none":
            problems.append("scaling_bound has no effect, since col_scaling and icl_scaling are none")
        if self.col_affine and self.group_size > 1:
            problems.append("col_affine multiplies a token with its one feature, so it needs col_grouping=none")
        if self.embed_dim >= 1 and self.row_num_cls >= 1:
            problems += self._head_problems()
        return problems

    def _head_problems(self) -> list[str]:
        problems = []
        row_dim = f"row_num_cls * embed_dim ({self.row_num_cls} * {self.embed_dim})"
        for name, width, what in (
            ("col_num_heads", self.embed_dim, f"embed_dim ({self.embed_dim})"),
            ("row_num_heads", self.embed_dim, f"embed_dim ({self.embed_dim})"),
            ("icl_num_heads", self.row_dim, row_dim),
        ):
            heads = getattr(self, name)
            if heads >= 1 and width % heads:
                problems.append(f"{what} is not divisible by {name} ({heads})")
        heads = self.row_num_heads
        if heads >= 1 and self.embed_dim % heads == 0 and self.embed_dim // heads % 2:
            problems.append(
                f"embed_dim / row_num_heads is {self.embed_dim // heads}, must be even: rotary embedding turns pairs"
            )
        return problems
