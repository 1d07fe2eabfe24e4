"""The settings of networks, and the registry of families by the type of their settings.

One dataclass builds a network, is saved in checkpoints and is translated for export. Networks are imported on first
use, since torch takes 2 s and the settings do not need it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from priors.options import option
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError

if TYPE_CHECKING:
    from tabicl_train.model.family import Network, NetworkConfig

__all__ = ["NetworkSettings", "TabICLConfig"]

# Declared of a setting that resume.allow_changes=true permits to change when a run is continued, since the weights
# fit. Without it, another value makes another network, which is refused in any case; see config/on_resume.py.
WEIGHTS_FIT = "refused"
GROUPINGS = ("none", "circular", "disjoint")


@dataclass
class TabICLConfig:
    """Architecture of a TabICL.

    The defaults are the classifier of TabICLv2 (arXiv 2602.11139); `v1()` is TabICL (2502.05564).
    """

    max_classes: int = 10
    """Number of logits, 2..10; for tables with more classes, the digits of their labels are predicted. 0 is regression:
    the target is a number, and quantiles of it are predicted."""
    num_quantiles: int = option(999, at_least=1)
    """Quantiles that regression predicts, at levels 1/(num_quantiles+1), 2/(num_quantiles+1), ..."""

    # column embedding
    embed_dim: int = option(128, at_least=1)
    """Width E of a column token; a row representation has D = row_num_cls * E values."""
    col_num_blocks: int = option(3, at_least=1)
    """Induced set attention blocks of the column embedding."""
    col_num_heads: int = option(8, at_least=1)
    """Attention heads of the column embedding."""
    col_num_inducing: int = option(128, at_least=1)
    """Inducing points of each block."""
    col_affine: bool = False
    """The set transformer yields a weight and a bias for each cell, as in TabICL v1."""
    col_grouping: str = option("circular", choices=GROUPINGS)
    """How features form the groups that column tokens see: none (each by itself), circular or disjoint."""
    col_group_size: int = option(3, at_least=1)
    """Features of a group; it has no effect with col_grouping=none."""
    col_target_aware: bool = True
    """Embed the labels before the set transformer."""
    col_scaling: str = "qassmax_elementwise"
    """Scalable softmax of the column embedding: none, ssmax, ssmax_mlp, ssmax_mlp_elementwise, qassmax or
    qassmax_elementwise; or, in place of softmax, scaled signed averaging (arXiv 2508.14685) with a fixed exponent (ssa)
    or one that each head learns (ssa_trainable)."""

    # row interaction
    row_num_blocks: int = option(3, at_least=1)
    """Transformer blocks over the tokens of a row."""
    row_num_heads: int = option(8, at_least=1)
    """Attention heads of these blocks."""
    row_num_cls: int = option(4, at_least=1)
    """CLS tokens of a row, whose outputs are its representation."""
    row_rope_base: float = option(100_000.0, above=0)
    """Base of the rotary position embedding."""
    row_rope_interleaved: bool = False
    """Rotate pairs of neighbors (2i, 2i+1), as in TabICL v1, instead of (i, i + head_dim/2)."""

    # in-context learning
    icl_num_blocks: int = option(12, at_least=1)
    """Transformer blocks over the rows of a table."""
    icl_num_heads: int = option(8, at_least=1)
    """Attention heads of these blocks."""
    icl_scaling: str = "qassmax_elementwise"
    """Scalable softmax, or signed averaging, of in-context learning; the choices are those of col_scaling."""

    # all stages
    scaling_bound: float | None = option(None, resume=WEIGHTS_FIT)
    """Keep base multipliers of the scalable softmax within +-bound, smoothly; the public format cannot express it."""
    ssa_exponent: float = 1.5
    """Exponent of ssa, or the first one of ssa_trainable; above 1. The paper took 1.1, 1.5 and 2."""
    ff_factor: int = option(2, at_least=1)
    """Width of the feed-forward networks as a multiple of the width of their input."""
    dropout: float = option(0.0, at_least=0, below=1, resume=WEIGHTS_FIT)
    """Dropout rate, in [0, 1). The dropped values depend on the number of ranks."""
    bias_free_ln: bool = False
    """Leave the bias out of the layer norms."""
    zero_init: bool = False
    """Start attention outputs and second feed-forward matrices at zero, as in TabICL v1."""
    col_attention_fp32: bool = option(False, resume=WEIGHTS_FIT)
    """Compute column attention in fp32 under any precision, as in the published one-GPU run."""
    checkpoint_rows: int = option(20_000, at_least=0, resume=WEIGHTS_FIT)
    """Recompute activations in the backward pass of packs with a longer table than this; 0 never recomputes."""

    missing_values: ClassVar[bool] = False  # it supports no NaN in Pack.X

    @classmethod
    def v1(cls) -> "TabICLConfig":
        """Return the settings of TabICL, the first version."""
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
    def is_regression(self) -> bool:
        """Whether numbers are predicted, not classes."""
        return self.max_classes == 0

    @property
    def outputs(self) -> int:
        """Values predicted for a query row: logits or quantiles."""
        return self.num_quantiles if self.is_regression else self.max_classes

    @property
    def label_width(self) -> int:
        """Values that a label is read as: a one-hot class, or the number itself."""
        return 1 if self.is_regression else self.max_classes

    @property
    def row_dim(self) -> int:
        """D, the width of a row representation and of the in-context learner."""
        return self.row_num_cls * self.embed_dim

    @property
    def group_size(self) -> int:
        """Features that one column token sees."""
        return 1 if self.col_grouping == "none" else self.col_group_size

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each."""
        problems = []
        if self.max_classes != 0 and not 2 <= self.max_classes <= 10:
            problems.append(f"max_classes is {self.max_classes}; it must be between 2 and 10, or 0 for regression")
        if self.num_quantiles != type(self).num_quantiles and not self.is_regression:
            problems.append(f"num_quantiles has no effect, since max_classes is {self.max_classes}; regression has 0")
        problems += scaling_problems(self, ("col_scaling", "icl_scaling"))
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
                f"embed_dim / row_num_heads is {self.embed_dim // heads}; it must be even, since rotary embedding "
                "rotates pairs"
            )
        return problems


@dataclass
class NetworkSettings:
    """What every network has; the settings of a network of your own inherit it and add a field `family`."""

    max_classes: int = 10
    """Number of logits, at least 2; 0 is regression, whose outputs are quantiles."""
    num_quantiles: int = option(999, at_least=1)
    """Quantiles that regression predicts, at levels 1/(num_quantiles+1), 2/(num_quantiles+1), ..."""
    dropout: float = option(0.0, at_least=0, below=1, resume=WEIGHTS_FIT)
    """Dropout rate, in [0, 1). The dropped values depend on the number of ranks."""
    checkpoint_rows: int = option(0, at_least=0, resume=WEIGHTS_FIT)
    """Recompute activations in the backward pass of packs with a longer table than this, if the network can; 0 never
    recomputes."""

    # Whether the network supports NaN in Pack.X; otherwise missing values are filled with the mean of their column.
    missing_values: ClassVar[bool] = False

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted, not classes."""
        return self.max_classes == 0

    @property
    def outputs(self) -> int:
        """Values predicted for a query row: logits or quantiles."""
        return self.num_quantiles if self.is_regression else self.max_classes

    def problems(self) -> list[str]:
        """Return every contradiction among the settings, one sentence each."""
        if self.max_classes == 0 or self.max_classes >= 2:
            return []
        return [f"max_classes is {self.max_classes}; it must be at least 2, or 0 for regression"]


def scaling_problems(settings: Any, names: tuple[str, ...], causal: bool = False) -> list[str]:
    """List the problems with the scaling rules of a network, and with the options of these rules.

    Parameters
    ----------
    settings : NetworkConfig
        Those of the network.
    names : tuple of str
        The settings that name a rule.
    causal : bool
        Whether the number of keys differs from query to query, which not all rules support.

    Returns
    -------
    list of str
        A sentence for each problem.
    """
    # Imported on first use, since it imports torch.
    from tabicl_train.model.scaling import OPTIONS

    problems = []
    possible = {name: rule for name, rule in register.scaling.items() if rule.causal or not causal}
    chosen = {name: getattr(settings, name) for name in names}
    for name, value in chosen.items():
        if value not in possible:
            problems.append(f"{name} is {value!r}; it must be one of {', '.join(possible)}")
        elif not possible[value].dropout and settings.dropout > 0:
            problems.append(f"{name} is {value}, which needs dropout=0; it is {settings.dropout}")

    # The options of rules: a value that is impossible, or that no chosen rule reads.
    used = {setting for value in chosen.values() if value in possible for setting in possible[value].options}
    for setting, (valid, limit) in OPTIONS.items():
        value, default = getattr(settings, setting, None), getattr(type(settings), setting, None)
        if value is not None and not valid(value):
            problems.append(f"{setting} is {value}; it must be {limit}")
        elif value != default and setting not in used:
            problems.append(
                f"{setting} has no effect, since " + " and ".join(f"{name} is {rule}" for name, rule in chosen.items())
            )
    return problems


FIRST = "tabicl"  # the family whose settings do not name it


class Family:
    """A family of networks: what is registered by `register.network`.

    Parameters
    ----------
    entry : type or str
        The class of the network, a subclass of `family.Network`, or "module:name", which is imported on first use.
    settings : type or str
        The dataclass of its settings, or "module:name". Except for that of TabICL it has a field `family`, whose
        default is the name.
    """

    def __init__(self, entry: Any, settings: Any) -> None:
        self.entry = entry
        self._settings = settings
        if not isinstance(settings, str):
            check_family_field(settings)

    @property
    def network(self) -> "type[Network]":
        """The class of the network."""
        return register.load(self.entry) if isinstance(self.entry, str) else self.entry

    @property
    def settings(self) -> type:
        """The dataclass of its settings."""
        if isinstance(self._settings, str):
            self._settings = register.load(self._settings)
            check_family_field(self._settings)
        return self._settings


def check_family_field(settings: type) -> None:
    """Refuse settings that checkpoints could not tell from those of another family."""
    if settings is not TabICLConfig and not isinstance(getattr(settings, "family", None), str):
        name = settings.__name__
        raise ConfigError([f"{name} needs a field with the name of the network: family: str = 'NAME'"])


register.network("tabicl", "tabicl_train.model.tabicl:TabICL", settings=TabICLConfig)


def family_of(config: "NetworkConfig") -> "type[Network]":
    """Return the class of the network with these settings; `family_of(config)(config)` builds it."""
    name = family_name(type(config))
    if name not in register.network or register.network[name].settings is not type(config):
        known = ", ".join(register.network)
        raise ConfigError([f"{type(config).__name__} has the settings of no registered network; there are {known}"])
    return register.network[name].network


def family_name(settings: type) -> str:
    """Return the name of the family with settings of this class."""
    return getattr(settings, "family", FIRST)


def named_parts(config: "NetworkConfig") -> Iterator[tuple[str, str]]:
    """Yield what a network uses by name: the kind, as in `tabicl_train.register`, and the name."""
    yield "network", family_name(type(config))
    for value in vars(config).values():
        if isinstance(value, str) and value in register.scaling:
            yield "scaling", value


def settings_of(values: dict[str, Any]) -> type:
    """Return the class of the settings with these values, as a file holds them; ConfigError if it is not registered."""
    name = values.get("family", FIRST)
    if not isinstance(name, str):
        # A file of another program may have any value there.
        raise ConfigError([register.network.unknown(str(name))])
    return register.network[name].settings
