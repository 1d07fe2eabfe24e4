"""Export: from a run or a checkpoint to a file or folder that others load; and reading weights of every kind.

The public format is for the public client, the hub format for publishing, ONNX for other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tabicl_train.config.checks import one_of
from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.families import family_name, family_of
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.hub_format import hub_problem, is_hub_folder, load_hub, save_hub
from tabicl_train.prediction.onnx_format import missing_packages, onnx_predictor, save_onnx
from tabicl_train.prediction.origin import Pretrained, network_config, origin_of
from tabicl_train.prediction.public_format import mismatches, public_weights, save_public
from tabicl_train.run_dir.checkpoint import averaged, is_run_checkpoint, load
from tabicl_train.run_dir.outputs import output_problems

WEIGHTS = ("trained", "ema", "last", "best")
FORMATS = {"tabicl": (".ckpt", ".pt", ".pth"), "hub": ("",), "onnx": (".onnx",)}  # with the suffixes of their names
NAMES = "FILE.ckpt, .pt or .pth (tabicl), FOLDER (hub) or FILE.onnx (onnx)"

# Of the tables on which an export is compared: tables, rows, labeled rows, columns.
SHAPES = ((2, 21, 13, 6), (1, 9, 1, 1), (3, 40, 39, 3), (1, 150, 100, 17))
TOLERANCE = {"tabicl": 1e-5, "hub": 1e-5, "onnx": 1e-4}  # of predictions; another runtime sums in another order

Predictor = Callable[[Tensor, Tensor], Tensor]  # X (B, N, M), y_train (B, n) -> logits or quantiles (B, N - n, C)


def load_checkpoint(checkpoint: str, weights: str = "trained") -> tuple[Any, dict[str, Tensor]]:
    """Configuration and weights of a run directory, a checkpoint of a run, a file in the public format or a hub folder.

    weights: trained, an average that the run keeps (ema, last), or best: those that validation found best
    """
    pretrained = read_weights(checkpoint, weights)
    return pretrained.config, pretrained.tensors


def read_weights(checkpoint: str, weights: str = "trained") -> Pretrained:
    """The same, with what is known of their origin. Raises ConfigError if there are no such weights."""
    if problems := one_of("weights", weights, WEIGHTS):
        raise ConfigError(problems)
    if (path := Path(checkpoint)).suffix in (".onnx", ".safetensors"):
        folder = f"; name the folder, {str(path.parent)!r}" if path.suffix == ".safetensors" else ""
        raise ConfigError([f"checkpoint is {checkpoint!r}; weights are not read from a file of this kind{folder}"])
    if is_hub_folder(path):
        content: dict = {}
    elif weights == "best":
        path, content = load(str(best_file(path)))
    else:
        path, content = load(checkpoint)
    if is_run_checkpoint(content):
        config, tensors = network_config(path, content["config"]["model"]), tensors_of(path, content, weights)
        if problems := mismatches(config, tensors):
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        return Pretrained(config, tensors, origin_of(path, content, weights))
    if weights != "trained":
        raise ConfigError([f"{path} holds one set of weights; weights={weights} needs a checkpoint of a run"])
    if not content:
        return load_hub(path)
    return Pretrained(*public_weights(path, content), content.get("origin", {}))


def best_file(run_dir: Path) -> Path:
    """The checkpoint with the best weights of a run; raises ConfigError if there is none."""
    if run_dir.is_file():
        raise ConfigError([f"checkpoint is {str(run_dir)!r}; weights=best needs the folder of a run"])
    path = run_dir / "checkpoints" / "best.ckpt"
    if run_dir.exists() and not path.exists():
        raise ConfigError([f"{run_dir} keeps no best weights: validation.every was 0, or there was no validation yet"])
    return path


def tensors_of(path: Path, content: dict, weights: str) -> dict[str, Tensor]:
    """The weights of one kind in the content of a run's checkpoint."""
    if weights in ("trained", "best"):
        return {name.removeprefix("model."): tensor for name, tensor in content["state_dict"].items()}
    if not (tensors := averaged(content, weights)):
        raise ConfigError([f"{path} keeps no such average: averages.{weights} was 0, or the run has just begun"])
    return tensors


def load_model(checkpoint: str) -> TabICL:
    """The TabICL of a run directory, a checkpoint, a public file or a hub folder, in evaluation mode.

    Raises ConfigError if the network is of another family.
    """
    return build_model(*load_checkpoint(checkpoint))


def build_model(config: Any, weights: dict[str, Tensor]) -> TabICL:
    if not isinstance(config, TabICLConfig):
        name = family_name(type(config))
        raise ConfigError([f"the network is of the family {name}; only a TabICL predicts real tables"])
    network = build_network(config, weights)
    assert isinstance(network, TabICL)
    return network


def load_network(checkpoint: str) -> Network:
    """The network of a run directory, a checkpoint or a hub folder, of any family, in evaluation mode."""
    return build_network(*load_checkpoint(checkpoint))


def build_network(config: NetworkConfig, weights: dict[str, Tensor]) -> Network:
    network = family_of(config)(config)
    network.load_state_dict(weights)
    return network.eval()


def export(
    checkpoint: str, output: str, weights: str = "trained", format: str | None = None, classes: int | None = None
) -> str:
    """Write a file or folder, and compare its predictions with the network's before it takes its place.

    ExportOptions in config/options.py explains the arguments.
    returns: a line that says what was written
    Raises ConfigError if that is impossible; what was at `output` then stays.
    """
    format = check_output(output, format, classes)
    pretrained = read_weights(checkpoint, weights)
    network = build_network(pretrained.config, pretrained.tensors)
    if format == "onnx" and not isinstance(network, TabICL):
        raise ConfigError(["format=onnx is for a TabICL; format=hub takes networks of every family"])
    outputs = chosen_outputs(pretrained.config, classes)
    kind = "Regressor" if pretrained.config.is_regression else "Classifier"

    def check(written: Path) -> None:
        predict = onnx_predictor(written) if format == "onnx" else predictor(load_network(str(written)))
        if problem := disagreement(network, predict, outputs, TOLERANCE[format]):
            raise ConfigError([f"{output} is not written: {problem}"])

    count = f"{output}: {sum(tensor.numel() for tensor in pretrained.tensors.values()):,} parameters"
    try:
        if format == "hub":
            save_hub(pretrained, Path(output), check)
            loader = f"TabICL{kind}" if network.predicts_real_tables else "prediction.export.load_network"
            return f"{count}, loads with tabicl_train.{loader}({output!r}); its README.md is the model card"
        if format == "onnx":
            info("converting to ONNX, which takes 10 seconds to a minute")
            assert isinstance(network, TabICL)
            save_onnx(network, Path(output), outputs, pretrained.summary, check)
            what = "quantiles" if pretrained.config.is_regression else "logits of {} classes"
            return f"{count}, X and y_train -> {what.format(outputs)}, agrees in onnxruntime"
        save_public(pretrained.config, pretrained.tensors, output, pretrained.origin, check)
    except OSError as error:
        raise ConfigError([f"output is {output!r}; it cannot be written ({first_line(error)})"]) from None
    return f"{count}, loads with tabicl.TabICL{kind}(model_path={output!r})"


def chosen_outputs(config: NetworkConfig, classes: int | None) -> int:
    """How many values an export predicts for a row; raises ConfigError for an impossible number of classes."""
    most = config.max_classes
    if config.is_regression and classes is not None:
        raise ConfigError([f"classes is {classes}; the network is a regressor, which has none"])
    if classes is not None and not 2 <= classes <= most:
        raise ConfigError([f"classes is {classes}; it must lie in 2..{most}, for which the network was trained"])
    return config.outputs if classes is None else classes


def check_output(output: str, format: str | None, classes: int | None) -> str:
    """The format to write; raises ConfigError with everything wrong with the arguments."""
    suffix = Path(output).suffix
    of_suffix = next((name for name, suffixes in FORMATS.items() if suffix in suffixes), None)
    problems = one_of("format", format, tuple(FORMATS)) if format is not None else []
    if of_suffix is None and format != "hub":  # a folder may be called v2.1
        problems.append(f"output is {output!r}; its name decides the format: {NAMES}")
    elif not problems and of_suffix is not None and format not in (None, of_suffix):
        problems.append(f"output is {output!r}, whose name says format={of_suffix}, but format is {format}")
    chosen = format or of_suffix
    if classes is not None and chosen != "onnx":
        problems.append(f"classes is {classes}; only format=onnx has a fixed number of classes")
    if chosen is None or problems:
        raise ConfigError(problems)
    if chosen == "hub":
        problem = hub_problem(Path(output))
        problems += [f"output is {output!r}; {problem}"] if problem else []
    elif is_among_checkpoints(Path(output)):
        problems.append(
            f"output is {output!r}, among the checkpoints of a run, which goes on from them; choose another folder"
        )
    else:
        problems += output_problems("output", output)
    if chosen == "onnx":
        problems += missing_packages()
    if problems:
        raise ConfigError(problems)
    return chosen


def is_among_checkpoints(path: Path) -> bool:
    folder = path.resolve().parent
    return folder.name == "checkpoints" and (folder.parent / "provenance.jsonl").exists()


def predictor(network: Network) -> Predictor:
    return lambda X, y_train: network(Pack.stack(X, y_train)).unflatten(0, (len(X), -1))


@torch.no_grad()
def disagreement(network: Network, predict: Predictor, outputs: int, tolerance: float) -> str | None:
    """How far the logits or quantiles of an export are from the network's on random tables; None if they agree."""
    what = "quantiles" if network.config.is_regression else "logits"
    generator = torch.Generator().manual_seed(0)
    for tables, rows, labeled, columns in SHAPES:
        if network.size_problem(network.config, rows, columns):
            continue
        X = torch.randn(tables, rows, columns, generator=generator)
        if network.config.missing_values:
            X[torch.rand(X.shape, generator=generator) < 0.2] = torch.nan
        if network.config.is_regression:
            y_train = torch.randn(tables, labeled, generator=generator)
        else:
            y_train = torch.randint(0, outputs, (tables, labeled), generator=generator)
        expected = predictor(network)(X, y_train)[..., :outputs]
        if not expected.isfinite().all():
            return f"the network's {what} are not finite"
        actual = predict(X, y_train)
        if not (actual.shape == expected.shape and (difference := (actual - expected).abs().max()) <= tolerance):
            size = f"by {difference:.1e}" if actual.shape == expected.shape else f"in shape, {tuple(actual.shape)}"
            return f"its {what} differ from the network's {size} (tables of {rows} rows and {columns} columns)"
    return None
