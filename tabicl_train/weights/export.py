"""Exports a run or a checkpoint to a file or folder for other programs; weights/reader.py reads what it writes.

Formats are registered by `register.export_format`. Files of the first one, the public format, load with
`tabicl.TabICLClassifier(model_path=FILE, allow_auto_download=False)`; weights/files.py describes their content. The
`tabicl` package silently replaces a missing value of the configuration by its own default, so all 26 are written. It
ignores the version and the origin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import safetensors.torch
import torch
from torch import Tensor

from priors.checksum import with_checksum
from priors.folders import without_folders
from tabicl_train.console import first_line, info, one_line
from tabicl_train.doors import register
from tabicl_train.doors.plugins import load as load_plugins
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_of
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import forward_differs, outputs_of
from tabicl_train.model.tabicl import TabICL
from tabicl_train.outputs import (
    expand_home,
    input_problems,
    output_problems,
    owner_problem,
    remove,
    remove_leftovers,
    save_tensors,
    write_atomically,
)
from tabicl_train.run.curves import counts_in_means
from tabicl_train.run.score_names import PROBES, REAL, validation_kind
from tabicl_train.weights.choice import BEST
from tabicl_train.weights.files import PUBLIC_VERSION, public_weights, read_safetensors
from tabicl_train.weights.hub_format import hub_problem, save_hub
from tabicl_train.weights.onnx_format import missing_packages, onnx_predictor, save_onnx
from tabicl_train.weights.pretrained import Pretrained, as_float32, mismatches, plugins_argument
from tabicl_train.weights.reader import build_network, files_of_weights, load_model, load_network, read_weights

__all__ = ["export", "load_model", "load_network"]  # the loaders moved to weights/reader.py, and stay importable here

# Tables on which an export is compared with the network: numbers of tables, rows, labeled rows and columns.
SHAPES = ((2, 21, 13, 6), (1, 9, 1, 1), (3, 40, 39, 3), (1, 150, 100, 17))

Predictor = Callable[[Tensor, Tensor], Tensor]  # X (B, N, M), y_train (B, n) -> logits or quantiles (B, N - n, C)


def export(
    checkpoint: str,
    output: str,
    weights: str | None = None,
    format: str | None = None,
    plugins: str | Path | Iterable[str | Path] | None = None,
) -> str:
    """Write weights to a file or folder, and check that its predictions agree with those of the network.

    Parameters
    ----------
    checkpoint : str
        What to export: a run directory, a checkpoint of a run, an export, or a name of weights in the package.
    output : str
        File or folder to write; its name decides the format.
    weights : str, optional
        Which weights of a run, as in `load_network`.
    format : str, optional
        tabicl, safetensors, hub or onnx; needed for a folder with a dot in its name.
    plugins : str or list of str, optional
        As in `load_network`.

    Returns
    -------
    str
        Lines about what was written, how to load it, and the validation of the best weights.

    Raises
    ------
    ConfigError
        If it cannot be written, or its predictions differ. What was at `output` before stays, unless a plug-in's format
        does not call `check`.
    """
    load_plugins(plugins)
    output = expand_home(output)
    chosen = check_format(output, format)  # before weights are read, which takes longer
    inputs = [("checkpoint", path) for path in files_of_weights(checkpoint)]
    problems = input_problems("output", output, inputs)
    if problems:
        raise ConfigError(problems)
    pretrained = read_weights(checkpoint, weights)
    written = one_line(export_weights(pretrained, output, chosen))
    if pretrained.origin.get("weights") == BEST:
        written += f"\n{one_line(best_in_words(pretrained.origin))}"
    return written


def best_in_words(origin: dict) -> str:
    """Describe, from the origin of the best weights of a run, the validation that chose them."""
    # Only tables of the kind that validation.best names, inside the trained range, had a part in the choice.
    settings = origin.get("config") or {}
    chosen_by = (settings.get("validation") or {}).get("best")
    scores = []
    for row in origin.get("validation") or []:
        kind = validation_kind(row["data"])
        if row["step"] != origin["step"] or kind == PROBES or chosen_by not in (kind, None):
            continue
        if not counts_in_means(row):
            continue
        name = row["data"] if kind == REAL else f"{row['data']} tables"
        scores.append(f"{name} of {row['rows']} rows (loss {row['loss']:.4f})")
    text = f"the best weights are of step {origin['step']}"
    if scores:
        text += f", by validation on {', '.join(scores)}"
    return text


def export_weights(pretrained: Pretrained, output: str, format: str) -> str:
    """Write weights to a file or folder; see `export`.

    Parameters
    ----------
    pretrained : Pretrained
        The weights.
    output : str
        The file or folder.
    format : str
        The name of a format, as `check_format` returned it.

    Returns
    -------
    str
        A line about what was written and how to load it.

    Raises
    ------
    ConfigError
        If it cannot be written, or its predictions differ.
    """
    # The network that the export must agree with. Its `forward` must agree with its `encode` and `decode`, too.
    chosen = register.export_format[format]
    network = build_network(pretrained)
    problem = forward_differs(network)
    if problem:
        raise ConfigError([f"{output} is not written: {problem}"])
    pretrained = replace(pretrained, origin=without_folders(pretrained.origin))  # an export may be published

    # The format calls `check` with what it has written, before that takes its place. A format of a plug-in may omit the
    # call.
    checked = False

    def check(path: Path) -> None:
        nonlocal checked
        checked = True
        try:
            problem = export_differs(network, chosen.predictor(path), chosen.tolerance)
        except ConfigError as error:  # its text names the temporary file
            problem = "; ".join(error.problems).replace(f"{path}: ", "").replace(str(path), "it")
        if problem:
            raise ConfigError([f"{output} is not written: {problem}"])

    # Write, and check at the end what was not checked before; what differs is removed, except a folder that was there.
    was_folder = Path(output).is_dir()
    try:
        for folder in {Path(output).parent.resolve(), Path(output).resolve().parent}:  # the output may be a link
            remove_leftovers(folder)
        loads = chosen.entry(pretrained, network, Path(output), check)
        if not checked:
            try:
                check(Path(output))
            except ConfigError as error:
                if was_folder:
                    stays = "the folder was there before, so what was written to it stays"
                    raise ConfigError([f"{problem}; {stays}" for problem in error.problems]) from None
                remove(Path(output))
                raise
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError([f"output is {output!r}; it cannot be written ({reason})"]) from None
    count = sum(tensor.numel() for tensor in pretrained.tensors.values())
    return f"{output}: {count:,} parameters, {loads}"


Check = Callable[[Path], None]  # raises ConfigError if the predictions of a written file or folder differ


def save_public(
    config: NetworkConfig,
    weights: dict[str, Tensor],
    path: str | Path,
    origin: dict | None = None,
    check: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write a file of the public format, as safetensors if the path ends so.

    Parameters
    ----------
    config : NetworkConfig
        The settings of the network.
    weights : dict of str to Tensor
        Its weights, which are written in float32.
    path : str or Path
        The file.
    origin : dict, optional
        The origin of the weights.
    check : callable, optional
        Called with the complete temporary file. If it raises, nothing is written.

    Raises
    ------
    ConfigError
        If the weights do not fit the configuration, or the format has no such network.
    OSError
        If the file cannot be written.
    """
    weights = {name: as_float32(weight.detach().to("cpu", copy=True)) for name, weight in weights.items()}
    problems = mismatches(config, weights)
    if problems:
        raise ConfigError([f"{path} is not written: {problem}" for problem in problems])
    public = {"config": family_of(config).to_public(config), "format_version": PUBLIC_VERSION, "origin": origin or {}}

    def write(file: BinaryIO) -> None:
        if Path(path).suffix == ".safetensors":
            tensors = {name: weight.contiguous() for name, weight in weights.items()}
            arrays = {name: weight.numpy() for name, weight in weights.items()}
            texts = {key: json.dumps(value) for key, value in public.items()}
            metadata = with_checksum({"format": "pt"} | texts, arrays)
            file.write(safetensors.torch.save(tensors, metadata))
        else:
            save_tensors(public | {"state_dict": weights}, file)
        file.flush()
        check(Path(file.name))

    write_atomically(Path(path), write)


def write_public(pretrained: Pretrained, network: Network, path: Path, check: Check) -> str:
    save_public(pretrained.config, pretrained.tensors, path, pretrained.origin, check)
    if path.suffix == ".safetensors":
        plugins_named = plugins_argument(pretrained)
        return f"loads with tabicl_train.{estimator_name(pretrained.config)}({str(path)!r}{plugins_named})"
    return f"loads with tabicl.{estimator_name(pretrained.config)}(model_path={str(path)!r})"


def write_hub(pretrained: Pretrained, network: Network, path: Path, check: Check) -> str:
    save_hub(pretrained, path, check)
    loader = estimator_name(pretrained.config) if network.predicts_real_tables else "prediction.export.load_network"
    plugins_named = plugins_argument(pretrained)
    return f"loads with tabicl_train.{loader}({str(path)!r}{plugins_named}); its README.md is the model card"


def write_onnx(pretrained: Pretrained, network: Network, path: Path, check: Check) -> str:
    instead = "format=hub exports any network"
    if type(network).forward is not TabICL.forward:  # the forward pass that is converted
        raise ConfigError(
            [f"format=onnx converts the forward pass of TabICL, and {type(network).__name__} has its own; {instead}"]
        )
    info("converting to ONNX, which takes 10 seconds to a minute")
    try:
        save_onnx(cast(TabICL, network), path, pretrained.summary, check)
    except (ConfigError, OSError):
        raise
    except Exception as error:  # from torch's exporter, or from a stage that a subclass has replaced
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError([f"format=onnx cannot convert {type(network).__name__} ({reason}); {instead}"]) from error
    what = "quantiles" if pretrained.config.is_regression else f"logits of {pretrained.config.outputs} classes"
    return f"X and y_train -> {what}, agrees in onnxruntime"


def estimator_name(config: NetworkConfig) -> str:
    return "TabICLRegressor" if config.is_regression else "TabICLClassifier"


def predictor(network: Network) -> Predictor:
    return lambda X, y_train: outputs_of(network, Pack.stack(X, y_train)).unflatten(0, (len(X), -1))


def read_back(path: Path) -> Predictor:
    return predictor(load_network(str(path)))


def file_problems(output: str) -> list[str]:
    return output_problems("output", output)


def folder_problems(output: str) -> list[str]:
    problem = owner_problem(output) or hub_problem(Path(output))
    return [f"output is {output!r}; {problem}"] if problem else []


@dataclass(frozen=True)
class Format:
    """An export format, as `register.export_format` registers it.

    Parameters
    ----------
    entry : callable
        `entry(pretrained, network, path, check)` writes a file or folder and returns a few words on how to load it. It
        should write to a temporary path in the same folder, call `check(temporary)`, which raises ConfigError if the
        predictions differ from the network's, and then rename it, as `outputs.write_atomically` does. If it does not
        call `check`, this is done at the end, and a file that differs is removed.
    suffixes : tuple of str
        The suffixes of file names that select this format; "" selects it for folders.
    predictor : callable, optional
        `predictor(path)` returns a function that predicts with what was written: X (B, N, M), y_train (B, n) -> logits
        or quantiles (B, N - n, C). Default: `load_network` reads it.
    tolerance : float, optional
        The largest absolute difference between its predictions and the network's. Default: 1e-5.
    problems : callable, optional
        `problems(output)` returns a list of reasons why a path cannot be written.
    """

    entry: Callable[[Pretrained, Network, Path, Check], str]
    suffixes: tuple[str, ...]
    predictor: Callable[[Path], Predictor] = read_back
    tolerance: float = 1e-5
    problems: Callable[[str], list[str]] = file_problems


register.export_format("tabicl", write_public, suffixes=(".ckpt", ".pt", ".pth"))
register.export_format(
    "safetensors",
    write_public,
    suffixes=(".safetensors",),
    # Not read_back, which goes by the suffix: the temporary file ends in .tmp.
    predictor=lambda path: predictor(build_network(public_weights(path, read_safetensors(path)))),
)
register.export_format("hub", write_hub, suffixes=("",), problems=folder_problems)
register.export_format(
    "onnx",
    write_onnx,
    suffixes=(".onnx",),
    predictor=onnx_predictor,
    tolerance=1e-4,  # onnxruntime sums in another order
    problems=lambda output: file_problems(output) + missing_packages(),
)


def check_format(output: str, format: str | None) -> str:
    """Return the name of the format to write.

    Parameters
    ----------
    output : str
        The file or folder.
    format : str or None
        The format that the user chose. None: the name of the output decides.

    Returns
    -------
    str

    Raises
    ------
    ConfigError
        If the format is unknown or ambiguous, does not fit the name, or the output cannot be written.
    """
    # Formats that the name of the output selects; a folder may have any name, such as v2.1, if the format is given.
    formats = register.export_format
    suffix = Path(output).suffix
    meant = [name for name, each in formats.items() if suffix in each.suffixes]
    if format is not None and format not in formats:
        problems = [formats.unknown(format)]
        if not meant:
            problems.append(f"output is {output!r}; its name decides the format: {names_of_formats()}")
        raise ConfigError(problems)
    writes_folder = format is not None and "" in formats[format].suffixes
    if not meant and not writes_folder:
        raise ConfigError([f"output is {output!r}; its name decides the format: {names_of_formats()}"])
    if format is None and len(meant) > 1:
        raise ConfigError([f"output is {output!r}, which may be {' or '.join(meant)}; set format=NAME"])
    if format is not None and meant and format not in meant:
        raise ConfigError([f"output is {output!r}, a name for format={meant[0]}, but format is {format}"])

    chosen = format or meant[0]
    problems = formats[chosen].problems(output)
    if problems:
        raise ConfigError(problems)
    return chosen


def names_of_formats() -> str:
    """Return how outputs of each format are named, in one line."""
    described = []
    for name, each in register.export_format.items():
        suffixes = [suffix for suffix in each.suffixes if suffix]
        described.append(f"FILE{joined_by_or(suffixes)} ({name})" if suffixes else f"FOLDER ({name})")
    return joined_by_or(described)


def joined_by_or(texts: list[str]) -> str:
    """Join texts as in `A, B or C`."""
    *others, last = texts
    return f"{', '.join(others)} or {last}" if others else last


@torch.no_grad()
def export_differs(network: Network, predict: Predictor, tolerance: float) -> str | None:
    """Describe how an export differs from the network on random tables; None if they agree.

    Parameters
    ----------
    network : Network
        The network that was exported.
    predict : callable
        The export: X (B, N, M), y_train (B, n) -> logits or quantiles (B, N - n, C).
    tolerance : float
        The largest absolute difference of logits or quantiles that is allowed.

    Returns
    -------
    str or None
    """
    what = "quantiles" if network.config.is_regression else "logits"
    generator = torch.Generator().manual_seed(0)
    for tables, rows, labeled, columns in SHAPES:
        if network.size_problem(network.config, rows, columns):
            continue

        # Random tables, with a fifth of the cells missing if the network reads missing values.
        X = torch.randn(tables, rows, columns, generator=generator)
        if network.config.missing_values:
            X[torch.rand(X.shape, generator=generator) < 0.2] = torch.nan
        if network.config.is_regression:
            y_train = torch.randn(tables, labeled, generator=generator)
        else:
            y_train = torch.randint(0, network.config.outputs, (tables, labeled), generator=generator)

        # Both predict. The comparison also fails if a difference is nan.
        expected = predictor(network)(X, y_train)
        if not expected.isfinite().all():
            return f"the network's {what} are not finite"
        actual = predict(X, y_train)
        where = f"(tables of {rows} rows and {columns} columns)"
        if actual.shape != expected.shape:
            return f"its {what} differ from the network's in shape, {tuple(actual.shape)} {where}"
        difference = (actual - expected).abs().max()
        if not difference <= tolerance:
            return f"its {what} differ from the network's by {difference:.1e} {where}"
    return None
