"""The reader of weights: from a name, a run directory, a checkpoint or an export to weights and to a network.

Writing weights is in `weights/export.py`, which reading does not import.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from tabicl_train.doors import plugins as plugins_module
from tabicl_train.errors import ConfigError, wrong_records
from tabicl_train.model.config import family_name, family_of
from tabicl_train.model.family import Network
from tabicl_train.run.checkpoint import is_run_checkpoint
from tabicl_train.weights import resolve
from tabicl_train.weights.choice import BEST, NEWEST, TRAINED, choice_problems, find_weights, say_once
from tabicl_train.weights.files import CONFIG, WEIGHTS, is_hub_folder, load_hub, public_weights, read_safetensors
from tabicl_train.weights.pretrained import Pretrained
from tabicl_train.weights.run_checkpoint import run_weights


def read_weights(checkpoint: str | Path, weights: str | None = None, accept_single_set: bool = False) -> Pretrained:
    """Read weights of any kind.

    Parameters
    ----------
    checkpoint : str or Path
        A run directory, a checkpoint of a run or an export. A text may also be a name of weights in the package; a name
        without a task is that of a classifier.
    weights : str, optional
        Which weights of a run, see weights/choice.py.
    accept_single_set : bool, optional
        Whether to read a file that holds one set of weights regardless of `weights`, and print a line about it.
        Default: False, which refuses the file.

    Returns
    -------
    Pretrained
        The weights, with the settings of their network and their origin.

    Raises
    ------
    ConfigError
        If they do not exist or cannot be read.
    """
    problems = choice_problems(weights)
    if problems:
        raise ConfigError(problems)
    with wrong_records(checkpoint):
        return read_records(checkpoint, weights, accept_single_set)


def read_records(checkpoint: str | Path, weights: str | None, accept_single_set: bool) -> Pretrained:
    """Do the work of `read_weights` after its checks; values of wrong types in a file raise errors of any type."""
    path = resolve(checkpoint)
    if path.suffix == ".onnx":
        raise ConfigError([f"checkpoint is {checkpoint!r}; weights cannot be read from a file of this kind"])

    # The file is an export of one of three kinds or a checkpoint of a run. A checkpoint, which `find_weights` finds in
    # a run directory, may hold several sets of weights.
    if path.suffix == ".safetensors":
        pretrained = public_weights(path, read_safetensors(path))
    elif is_hub_folder(path):
        pretrained = load_hub(path)
    else:
        path, content, kind = find_weights(path, weights)
        if is_run_checkpoint(content):
            return run_weights(path, content, kind)
        pretrained = public_weights(path, content)

    # An export holds the one set that was exported, so `weights` cannot choose another.
    if weights in (None, TRAINED, NEWEST):
        return pretrained
    if not accept_single_set:
        needed = "a run directory" if weights == BEST else "a checkpoint of a run"
        raise ConfigError([f"{path} holds one set of weights; weights={weights} needs {needed}"])
    say_once(f"weights   {checkpoint} holds one set of weights, which is used; weights={weights} applies to runs only")
    return pretrained


def files_of_weights(checkpoint: str | Path) -> list[Path]:
    """Return the files and folders that `read_weights` may read, so that an output is not written over them."""
    path = resolve(checkpoint)
    if not path.is_dir():
        return [path]
    return [path, *(path / "checkpoints").glob("*.ckpt"), path / WEIGHTS, path / CONFIG]


def load_model(checkpoint: str | Path, weights: str | None = None) -> Network:
    """Load a network as `load_network` does; raises ConfigError if it predicts no real tables."""
    return build_model(read_weights(checkpoint, weights))


def build_model(pretrained: Pretrained) -> Network:
    if not family_of(pretrained.config).predicts_real_tables:
        name = family_name(type(pretrained.config))
        raise ConfigError([f"the network is of the family {name}, which predicts no real tables"])
    return build_network(pretrained)


def load_network(
    checkpoint: str | Path, weights: str | None = None, plugins: str | Path | Iterable[str | Path] | None = None
) -> Network:
    """Load a network of any family.

    Parameters
    ----------
    checkpoint : str or Path
        A run directory, a checkpoint of a run or an export. A text may also be a name of weights in the package.
    weights : str, optional
        Which weights of a run directory: best (by validation), newest (or trained), or ema, an average that the run
        keeps. Default: the best if there are any, otherwise the newest.
    plugins : str or list of str, optional
        Modules and Python files that define the network, such as ["./mine.py"]. They are imported.

    Returns
    -------
    Network
        The network in evaluation mode, on the CPU, in float32.

    Raises
    ------
    ConfigError
        If the file cannot be read.
    """
    plugins_module.load(plugins)
    return build_network(read_weights(checkpoint, weights))


def build_network(pretrained: Pretrained) -> Network:
    with torch.random.fork_rng(devices=[]):  # initial weights, which are replaced, leave torch's generator as it is
        network = family_of(pretrained.config)(pretrained.config).float()  # torch's default type may be another
    network.load_state_dict(pretrained.tensors)
    return network.eval()
