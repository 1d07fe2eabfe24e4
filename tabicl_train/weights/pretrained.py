"""Weights, the settings of their network, their origin, and the range of the tables that they were trained on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from priors.options import build, options_of
from tabicl_train.console import first_line
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_of, settings_of
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.run.checkpoint import non_finite, state_dict_problem
from tabicl_train.run.curves import INSIDE, OUTSIDE, UNKNOWN
from tabicl_train.run.plain_values import steps_of_stages
from tabicl_train.run.removed import without_removed
from tabicl_train.weights.choice import TRAINED, weights_in_words

NEEDED = ("network", "scaling")  # what a file of weights needs of plug-ins


@dataclass(frozen=True)
class TrainedRange:
    """The sizes of the tables that a network was trained on, without query rows.

    These are the tables of all stages that its run has started, and those that the weights it started from have seen.
    """

    labeled_rows: tuple[int, int]  # the fewest and the most
    features: tuple[int, int]
    classes: int | None = None  # the most; None for numbers

    def holds(self, labeled_rows: int, features: int, classes: int | None = None) -> bool:
        """Whether all sizes of a task lie inside, bounds included."""
        if classes is not None and self.classes is not None and classes > self.classes:
            return False
        return (
            self.labeled_rows[0] <= labeled_rows <= self.labeled_rows[1]
            and self.features[0] <= features <= self.features[1]
        )

    def overlaps(self, other: TrainedRange) -> bool:
        """Whether there are sizes that lie inside both ranges."""
        both = self.common(other)
        return both.labeled_rows[0] <= both.labeled_rows[1] and both.features[0] <= both.features[1]

    def common(self, other: TrainedRange) -> TrainedRange:
        """Return the range of the sizes that lie inside both; it holds nothing if they do not overlap."""
        limits = [classes for classes in (self.classes, other.classes) if classes is not None]
        return TrainedRange(
            common_bounds(self.labeled_rows, other.labeled_rows),
            common_bounds(self.features, other.features),
            min(limits, default=None),
        )

    def with_those_of(self, other: TrainedRange) -> TrainedRange:
        """Return the range of tables of both."""
        return TrainedRange(
            widest_bounds([self.labeled_rows, other.labeled_rows]),
            widest_bounds([self.features, other.features]),
            max((classes for classes in (self.classes, other.classes) if classes is not None), default=None),
        )

    def recorded(self, max_classes: int) -> dict[str, Any]:
        """Return what files hold: the classes only if they are fewer than those of the network, `max_classes`."""
        sizes: dict[str, Any] = {"labeled_rows": list(self.labeled_rows), "features": list(self.features)}
        if self.classes is not None and self.classes < max_classes:
            sizes["classes"] = self.classes
        return sizes

    def __str__(self) -> str:
        (fewest, most), (narrowest, widest) = self.labeled_rows, self.features
        text = f"{fewest:,} to {most:,} labeled rows, {narrowest} to {widest} features"
        if self.classes is not None:
            text += f", up to {self.classes} classes"
        return text


def common_bounds(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


def widest_bounds(bounds: Iterable[Iterable[int]]) -> tuple[int, int]:
    values = [bound for pair in bounds for bound in pair]
    return min(values), max(values)


def position(trained: TrainedRange | None, sizes: Mapping[str, Any]) -> str:
    """Return where a task of these sizes lies: labeled_rows, features and, if it has classes, their number."""
    if trained is None:
        return UNKNOWN
    if trained.holds(sizes["labeled_rows"], sizes["features"], sizes.get("classes")):
        return INSIDE
    return OUTSIDE


@dataclass(frozen=True)
class Pretrained:
    """Weights of a network."""

    config: Any  # the settings of any family, see model/family.py
    tensors: dict[str, Tensor]
    origin: dict = field(default_factory=dict)  # see `KINDS_OF_ORIGIN`; empty for files of the `tabicl` package

    @property
    def trained_range(self) -> TrainedRange | None:
        """The sizes of the tables that the network was trained on; None if unknown."""
        sizes = self.origin.get("trained_range")
        return recorded_range(sizes, self.config.max_classes) if sizes else None

    @property
    def name(self) -> str:
        """Which weights of which step they are, as scores name them."""
        if self.origin.get("step") is None:
            return "those of a file that records no step"
        return weights_in_words(self.origin.get("weights") or TRAINED, self.origin["step"], self.origin.get("steps"))

    @property
    def summary(self) -> dict[str, str]:
        """The most important entries of the origin as text, for the metadata of file formats."""
        entries: dict[str, Any] = {key: self.origin.get(key) for key in ("run", "step", "weights", "commit")}
        if self.origin.get("uncommitted_changes"):
            entries["commit"] += " with uncommitted changes"
        entries["trained_range"] = self.trained_range
        return {key: str(value) for key, value in entries.items() if value is not None}


# What a file records about the origin of its weights; any of it may be missing or None.
KINDS_OF_ORIGIN = {
    "run": str,
    "step": int,
    "steps": int,
    "weights": str,
    "commit": str,
    "uncommitted_changes": bool,
    "command": list,
    "versions": dict,
    "stream_version": int,
    "trained_range": dict,
    "config": dict,
    "validation": list,
    "evaluation": list,
}


def plugins_in(origin: Any) -> list[dict]:
    """Return what the origin of weights in a file says of plug-ins; nothing if the file is of another program."""
    records = origin.get("plugins") if isinstance(origin, dict) else None
    return records if isinstance(records, list) else []


def plugins_argument(pretrained: Pretrained) -> str:
    """Return the argument of a call from Python that loads weights: `, plugins=['mine.py']`; "" without plug-ins."""
    names = [plugins.name_of(record) for record, _ in plugins.uses(plugins_in(pretrained.origin), NEEDED)]
    return f", plugins={names}" if names else ""


def checked_origin(source: str | Path, origin: Any) -> dict:
    """Return the origin of weights that a file holds; raises ConfigError if its types are not those of an export."""
    if not isinstance(origin, dict):
        raise ConfigError([f"{source}: its origin is not a dictionary"])
    wrong = []
    for key, kind in KINDS_OF_ORIGIN.items():
        if origin.get(key) is not None and not isinstance(origin[key], kind):
            wrong.append(key)
    sizes = origin.get("trained_range")
    if isinstance(sizes, dict) and sizes and not is_trained_range(sizes):
        wrong.append("trained_range")
    if wrong:
        raise ConfigError([f"{source}: origin.{key} is {origin[key]!r}, as no export writes it" for key in wrong])
    return origin


def is_trained_range(sizes: dict) -> bool:
    """Whether values of a file are those of a TrainedRange."""
    if not {"labeled_rows", "features"} <= sizes.keys() <= {"labeled_rows", "features", "classes"}:
        return False
    if type(sizes.get("classes", 0)) is not int:
        return False
    for bounds in (sizes["labeled_rows"], sizes["features"]):
        if not isinstance(bounds, list) or [type(bound) for bound in bounds] != [int, int]:
            return False
    return True


def network_config(source: Path, settings: Any) -> Any:
    """Return the settings of a network from a file, with defaults for missing ones; raises ConfigError."""
    if not isinstance(settings, dict):
        raise ConfigError([f"{source}: its settings of the network are not a dictionary"])
    try:
        cls = settings_of(settings)
    except ConfigError as error:
        raise ConfigError([f"{source}: {problem}" for problem in error.problems]) from None
    settings = without_removed(source, settings, "model.")
    config, problems = build(cls, settings, "model")
    unknown = [f"model.{name}={value}" for name, value in settings.items() if name not in options_of(cls)]
    if unknown:
        plugin = plugins.of_module(cls.__module__)
        owner = "this version of tabicl-train" if plugin is None else f"the plug-in {plugin.module} as it is now"
        raise ConfigError([f"{source} has {', '.join(unknown)}, which {owner} does not have"])
    if problems:  # such as a scaling rule that nobody has registered
        raise ConfigError([f"{source}: {problem}" for problem in problems])
    return config


def as_float32(tensor: Tensor) -> Tensor:
    """Return a weight as exports hold it: floats in float32, and others, such as a buffer of indices, as they are."""
    return tensor.float() if tensor.is_floating_point() else tensor


def mismatches(config: NetworkConfig, weights: dict[str, Tensor]) -> list[str]:
    """List why the network of the configuration cannot have these weights: their names, types, shapes and values."""
    problem = state_dict_problem(weights)
    if problem is not None:
        return [problem]
    try:
        needed = build_without_memory(config, 1000 + 20 * len(weights)).state_dict()
    except Exception as error:  # of any type, in a network of a plug-in
        return [f"its settings and its {len(weights):,} weights do not fit: {first_line(error)}"]
    expected = {name: tuple(weight.shape) for name, weight in needed.items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    problems = []
    missing = sorted(expected.keys() - shapes.keys())
    if missing:
        problems.append(f"{len(missing)} weights are missing, for example {missing[0]}")
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        problems.append(f"{len(unknown)} weights do not belong to the network, for example {unknown[0]}")
    for name in sorted(expected.keys() & shapes.keys()):
        if expected[name] != shapes[name]:
            problems.append(f"{name} has shape {shapes[name]}, the network needs {expected[name]}")
            break  # one example is enough
    if problems:
        return problems
    for name, weight in weights.items():
        if not is_of_kind(weight, needed[name].dtype):
            return [f"{name} is of type {weight.dtype}, the network needs {needed[name].dtype}"]
    problem = non_finite({name: weight.to(needed[name].dtype) for name, weight in weights.items()})
    if problem is not None:
        problems.append(f"{problem}; use other weights, such as an earlier checkpoint of the run")
    return problems


def build_without_memory(config: NetworkConfig, most: int) -> Network:
    """Build a network without memory for its weights; raises ValueError once it has more parts than `most`."""
    parts = 0
    thread = threading.get_ident()

    def count(*_: Any) -> None:
        nonlocal parts
        parts += threading.get_ident() == thread  # other threads may build networks, too
        if parts > most:
            raise ValueError(f"the network has more than {most:,} parts")

    hooks = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ]
    try:
        with torch.device("meta"):
            return family_of(config)(config)
    finally:
        for hook in hooks:
            hook.remove()


def is_of_kind(weight: Tensor, needed: torch.dtype) -> bool:
    """Whether a weight of a file is a value of the type that the network needs."""
    if weight.dtype == needed:
        return True
    if not weight.is_floating_point() or needed.is_complex:
        return False
    # Exports of version 0.2.0 hold integers as floats.
    return needed.is_floating_point or torch.equal(weight.to(needed).to(weight.dtype), weight)


def check_weights(source: Path | str, config: NetworkConfig, weights: dict[str, Tensor]) -> None:
    """Raise ConfigError if the network of the configuration cannot have the weights of a file."""
    problems = mismatches(config, weights)
    if problems:
        raise ConfigError([f"{source}: {problem}" for problem in problems])


def trained_range(content: dict) -> TrainedRange:
    """Return the trained range of a run's checkpoint.

    It depends on `config`, `global_step`, `largest_tables` (see stream/curriculum.py) and `inherited_range`, the range
    recorded with the weights that the run started from, or None.
    """
    config = content["config"]
    stages = config["curriculum"]["stages"]
    max_classes = config["model"]["max_classes"]
    lengths = {name: stage["steps"] for name, stage in stages.items()}
    started = steps_of_stages(lengths, max(content["global_step"], 1))
    largest = content.get("largest_tables", {})
    drawn = [limited(stages[name], largest.get(name, {})) for name in started]
    range_of_run = range_of_stages(drawn, max_classes)
    inherited = content.get("inherited_range")
    if inherited is None:
        return range_of_run
    inherited_range = recorded_range(inherited, max_classes)
    if content["global_step"] == 0:  # the weights as they were taken over
        return inherited_range
    return range_of_run.with_those_of(inherited_range)


def limited(stage: dict, largest: Mapping[str, int]) -> dict:
    """Return a stage with the sizes of its tables, given the most rows, features and classes that they can have."""
    sizes = stage | {"rows": rows_of(stage)}
    for name in ("rows", "features"):
        if name in largest:
            sizes[name] = [min(bound, largest[name]) for bound in sizes[name]]
    if "classes" in largest:
        sizes["classes"] = largest["classes"]
    return sizes


def rows_of(stage: dict) -> list[int]:
    """Return the fewest and the most rows of the tables of a stage.

    In version 0.2.0, a stage could draw a share of its tables from a second range.
    """
    small_share = stage.get("small_share", 0.0)
    if small_share == 0:
        return stage["rows"]
    if small_share == 1:
        return stage["small_rows"]
    bounds = [*stage["rows"], *stage["small_rows"]]
    return [min(bounds), max(bounds)]


def range_of_stages(stages: Iterable[dict], max_classes: int) -> TrainedRange:
    """Return the range of the tables of stages, for a network with so many classes (0: numbers)."""
    labeled = []
    features = []
    classes = 0
    for stage in stages:
        fewest, most = stage["rows"]
        lowest_share, highest_share = stage["train_share"]
        labeled += [round(fewest * lowest_share), round(most * highest_share)]
        features.append(stage["features"])
        classes = max(classes, min(stage.get("classes", max_classes), max_classes))
    return TrainedRange(widest_bounds([labeled]), widest_bounds(features), classes or None)


def recorded_range(recorded: Mapping[str, Any], max_classes: int) -> TrainedRange:
    """Return a range as a file holds it, of a network with so many classes (0: numbers)."""
    (fewest, most), (narrowest, widest) = recorded["labeled_rows"], recorded["features"]
    classes = min(recorded.get("classes", max_classes), max_classes)
    return TrainedRange((fewest, most), (narrowest, widest), classes or None)
