"""The `tabicl` package's configuration of a TabICL network, both ways."""

from typing import Any, get_type_hints

from priors.options import check
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig, family_name

# our names -> the `tabicl` package's
NAMES = {
    "max_classes": "max_classes",
    "num_quantiles": "num_quantiles",
    "embed_dim": "embed_dim",
    "col_num_blocks": "col_num_blocks",
    "col_num_heads": "col_nhead",
    "col_num_inducing": "col_num_inds",
    "col_affine": "col_affine",
    "col_grouping": "col_feature_group",
    "col_group_size": "col_feature_group_size",
    "col_target_aware": "col_target_aware",
    "col_scaling": "col_ssmax",
    "row_num_blocks": "row_num_blocks",
    "row_num_heads": "row_nhead",
    "row_num_cls": "row_num_cls",
    "row_rope_base": "row_rope_base",
    "row_rope_interleaved": "row_rope_interleaved",
    "icl_num_blocks": "icl_num_blocks",
    "icl_num_heads": "icl_nhead",
    "icl_scaling": "icl_ssmax",
    "ff_factor": "ff_factor",
    "dropout": "dropout",
    "bias_free_ln": "bias_free_ln",
    "zero_init": "zero_init",
}
# settings of the package that are fixed here: pre-norm, GELU
FIXED = {"activation": "gelu", "norm_first": True, "recompute": False}
GROUPINGS: dict[str, str | bool] = {"none": False, "circular": "same", "disjoint": "valid"}
SWITCHES = {  # the package also accepts booleans
    "col_grouping": {True: "circular"},
    "col_scaling": {True: "qassmax_elementwise", False: "none"},
    "icl_scaling": {True: "qassmax_elementwise", False: "none"},
}


def beyond_public(config: TabICLConfig) -> list[str]:
    """List the settings that the `tabicl` package does not have."""
    if type(config) is not TabICLConfig:
        return [f"model.family={family_name(type(config))}"]
    settings = []
    if config.scaling_bound is not None:
        settings.append(f"model.scaling_bound ({config.scaling_bound})")
    for name in ("col_scaling", "icl_scaling"):
        rule = getattr(config, name)
        if register.scaling[rule].public is None:
            settings.append(f"model.{name}={rule}")
    return settings


def public_values() -> dict[str, dict[str, Any]]:
    """Return the package's names for the choices of a setting, by setting."""
    rules = {name: rule.public for name, rule in register.scaling.items() if rule.public is not None}
    return {"col_grouping": GROUPINGS, "col_scaling": rules, "icl_scaling": rules}


def to_public(config: TabICLConfig) -> dict[str, Any]:
    """Return the `tabicl` package's configuration of the same network, 26 keys; raises ConfigError if it has none."""
    values = public_values()
    if beyond := beyond_public(config):
        # The package's names of rules help only if a rule is the problem; rules are the last settings listed.
        has = f", it has {', '.join(values['icl_scaling'])}" if "_scaling=" in beyond[-1] else ""
        it = "it" if len(beyond) == 1 else "them"
        raise ConfigError(
            [f"the public format has no {' and no '.join(beyond)}{has}; format=hub and format=onnx can express {it}"]
        )
    public = dict(FIXED)
    for ours, theirs in NAMES.items():
        value = getattr(config, ours)
        public[theirs] = values[ours][value] if ours in values else value
    return public


def from_public(public: dict[str, Any]) -> TabICLConfig:
    """Return our configuration of the `tabicl` package's network; raises ConfigError with all that is not supported."""
    # All keys must be there: the package would take other defaults for those that are missing.
    missing = [key for key in (*NAMES.values(), *FIXED) if key not in public]
    if missing:
        raise ConfigError([f"the configuration lacks {', '.join(missing)}"])

    # What is fixed here. `recompute` is not compared, since it changes no prediction.
    problems = []
    for key in ("activation", "norm_first"):
        if public[key] != FIXED[key]:
            problems.append(f"{key}={public[key]!r} is not supported, only {FIXED[key]!r}")

    # Our values: choices by their names in the package, others as they are. An int may stand for a float.
    names_of_choices = public_values()
    values = {}
    for name, kind in get_type_hints(TabICLConfig).items():
        if name not in NAMES:
            continue
        theirs = NAMES[name]
        value = public[theirs]
        if name in names_of_choices:
            ours = {public_name: choice for choice, public_name in names_of_choices[name].items()} | SWITCHES[name]
            # A tuple is searched, not the dictionary, since a list has no hash.
            if value not in tuple(ours):
                problems.append(f"{theirs}={value!r} is not supported, only {', '.join(map(repr, ours))}")
                continue
            value = ours[value]
        elif type(value) is not kind and not (kind is float and type(value) is int):
            problems.append(f"{theirs}={value!r} is not of type {kind.__name__}")
            continue
        values[name] = kind(value)
    if problems:
        raise ConfigError(problems)

    # Settings without effect keep our defaults, with which `check` has no problem.
    if values["col_grouping"] == "none":
        del values["col_group_size"]
    if values["max_classes"] != 0:
        del values["num_quantiles"]
    config = TabICLConfig(**values)
    if problems := check(config):
        raise ConfigError(problems)
    return config
