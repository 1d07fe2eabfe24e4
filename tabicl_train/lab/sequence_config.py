"""The settings of the transformer over sequences, in a file that does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from priors.options import option
from tabicl_train.model.config import scaling_problems

__all__ = ["SequenceConfig"]


@dataclass
class SequenceConfig:
    """Architecture of a transformer over sequences.

    The defaults are the network of the SSA paper (arXiv 2508.14685) with softmax: 12 layers, 8 heads and width 256, as
    in GPT-2.
    """

    family: str = "sequence"
    """The family of the network, which distinguishes its settings from those of a TabICL."""
    max_classes: int = 2
    """Number of logits, 2..10. 0 is regression, which predicts the number itself with the squared error as loss."""
    num_blocks: int = option(12, at_least=1)
    """Transformer blocks."""
    num_heads: int = option(8, at_least=1)
    """Attention heads of a block."""
    width: int = option(256, at_least=1)
    """Width of a token."""
    ff_factor: int = option(4, at_least=0)
    """Width of the feed-forward networks as a multiple of the width of a token; 0 leaves them out."""
    scaling: str = "none"
    """Scores of attention: none (softmax), or scaled signed averaging with a fixed exponent (ssa) or one that each head
    learns (ssa_trainable)."""
    ssa_exponent: float = 1.5
    """Exponent of ssa, or initial exponent of ssa_trainable; above 1. The paper has 1.1, 1.5 and 2."""
    max_tokens: int = option(512, at_least=1)
    """Longest sequence in tokens, numbers and labels together. Each position has its own embedding."""
    dropout: float = option(0.0, at_least=0, below=1)
    """Dropout rate, in [0, 1). The dropped values depend on the number of ranks."""
    checkpoint_rows: int = option(20_000, at_least=0)
    """Recompute activations in the backward pass of packs with a longer table than this; 0 never recomputes."""

    missing_values: ClassVar[bool] = False
    bias_free_ln: ClassVar[bool] = False
    zero_init: ClassVar[bool] = False

    @property
    def is_regression(self) -> bool:
        """Whether the network predicts numbers instead of classes."""
        return self.max_classes == 0

    @property
    def outputs(self) -> int:
        """Number of values that are predicted for a row: the logits, or the number."""
        return 1 if self.is_regression else self.max_classes

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each; none if the network can be built."""
        problems = []
        if self.family != type(self).family:
            problems.append(f"family is {self.family!r}; it cannot be changed; choose another model instead")
        if self.max_classes != 0 and not 2 <= self.max_classes <= 10:
            problems.append(f"max_classes is {self.max_classes}; it must be between 2 and 10, or 0 for regression")
        if self.num_heads >= 1 and self.width % self.num_heads:
            problems.append(f"width ({self.width}) is not divisible by num_heads ({self.num_heads})")
        return problems + scaling_problems(self, ("scaling",), causal=True)
