"""What training minimizes: one loss for each table of a pack, from the predictions of the network.

An objective is normalized within each table, so a pack may be halved, and tables may move to another rank, without
changing the sum. Without `objective=`, the network's own loss is minimized; validation always reports that loss.

B tables, C classes, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from priors.options import option
from tabicl_train.config import build
from tabicl_train.console import counted
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError
from tabicl_train.model.family import Network, random_tables
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import pinball

__all__ = ["CrossEntropy", "Objective", "Pinball", "build_objective", "losses_of", "mixing_problem"]

CLASS_WEIGHTS = ("none", "balanced")
TOLERANCE = 1e-4  # of the losses of two tables together and alone, relative to the larger one


class Objective:
    """The base class of objectives: dataclasses whose fields are their options."""

    def __call__(self, predictions: Tensor, pack: Pack, network: Network) -> Tensor:
        """Compute the loss of each table.

        Parameters
        ----------
        predictions : Tensor
            (query rows of all tables, outputs), from the network.
        pack : Pack
            The tables; `network.targets(pack)` are the labels of the query rows.
        network : Network
            The network; `network.means(values, pack)` averages over the query rows of each table.

        Returns
        -------
        Tensor
            (B,) float32, the loss of each table.
        """
        raise NotImplementedError

    def problems(self) -> list[str]:
        """List options that contradict each other; bounds of a single one are declared by `priors.options.option`."""
        return []


@dataclass
class CrossEntropy(Objective):
    """Cross entropy of logits.

    References
    ----------
    Szegedy et al., Rethinking the Inception architecture, arXiv 1512.00567, section 7 (label smoothing).
    """

    label_smoothing: float = option(0.0, at_least=0, below=1)
    """Share of the target that is spread evenly over all outputs of the network, in [0, 1)."""
    class_weights: str = option("none", choices=CLASS_WEIGHTS)
    """none (all query rows of a table count equally), or balanced (all classes among its query rows do)."""

    def __call__(self, predictions: Tensor, pack: Pack, network: Network) -> Tensor:
        """See `Objective`."""
        y = network.targets(pack)  # (query rows,)
        losses = F.cross_entropy(predictions.float(), y, reduction="none", label_smoothing=self.label_smoothing)
        if self.class_weights == "none":
            return network.means(losses, pack)

        # Weigh each query row by one over the number of query rows of its class, table by table.
        counts = [N - n for N, n, _ in pack.shapes]
        if len(y) != sum(counts):
            raise ValueError("class_weights=balanced needs a network whose targets are the labels of the query rows")
        table_losses = []
        for row_losses, labels in zip(losses.split(counts), y.split(counts), strict=True):
            rows_of_class = F.one_hot(labels, predictions.shape[1]).sum(0)  # (C,)
            weights = 1 / rows_of_class[labels]  # (query rows of the table,)
            table_losses.append((weights * row_losses).sum() / weights.sum())
        return torch.stack(table_losses)


@dataclass
class Pinball(Objective):
    """Pinball loss of quantiles, as in TabICLv2 (arXiv 2602.11139); see `quantiles.pinball`."""

    def __call__(self, predictions: Tensor, pack: Pack, network: Network) -> Tensor:
        """See `Objective`."""
        return network.means(pinball(predictions, network.targets(pack)), pack)


def build_objective(settings: dict[str, Any] | None) -> Any:
    """Build the objective with these settings; without settings, None: the network's own loss."""
    if settings is None:
        return None
    options = {key: value for key, value in settings.items() if key != "name"}
    return build.build_callable(register.objective[settings["name"]], options)


def losses_of(
    network: Network,
    pack: Pack,
    checkpoint_rows: int | None = None,
    objective: Any = None,
    auxiliary: dict[str, float] | None = None,
    predict: Callable[..., Any] | None = None,
) -> Tensor:
    """Compute what training minimizes for each table of a pack.

    Parameters
    ----------
    network : Network
        The network. In addition to its predictions it may return auxiliary losses by name, each (B,).
    pack : Pack
        The tables.
    checkpoint_rows : int, optional
        See `Network.forward`.
    objective : Objective, optional
        What to compute. Default: the network's own loss.
    auxiliary : dict, optional
        Weights of the auxiliary losses by name; losses without a weight do not count.
    predict : callable, optional
        A function to call in place of the network, with the same arguments.

    Returns
    -------
    Tensor
        (B,) float32, the loss of each table.

    Raises
    ------
    ConfigError
        If the objective does not return such a tensor, or the network lacks a named auxiliary loss.
    """
    return losses_from((predict or network)(pack, checkpoint_rows), network, pack, objective, auxiliary)


def losses_from(
    outputs: Any, network: Network, pack: Pack, objective: Any = None, auxiliary: dict[str, float] | None = None
) -> Tensor:
    """Compute the same as `losses_of` from the outputs of the network for the pack."""
    predictions = outputs
    extra: dict[str, Tensor] = {}
    if isinstance(outputs, tuple):
        predictions, extra = outputs
    losses = network.losses(predictions, pack) if objective is None else objective(predictions, pack, network)

    # An objective of a plug-in may return anything.
    expected = f"it must return a tensor of shape ({len(pack)},), one loss per table"
    if not isinstance(losses, Tensor):
        returned = "None" if losses is None else f"a {type(losses).__name__}"
        raise ConfigError([f"{title_of(objective)} returns {returned}; {expected}"])
    if losses.shape != (len(pack),):
        returned = f"the shape {tuple(losses.shape)} for a pack of {counted(len(pack), 'table')}"
        raise ConfigError([f"{title_of(objective)} returns {returned}; {expected}"])

    # Auxiliary losses of the network.
    for name, weight in (auxiliary or {}).items():
        if name not in extra:
            has = f"it has {', '.join(extra)}" if extra else "it has none"
            raise ConfigError([f"auxiliary_losses.{name}: the network returns no such loss; {has}"])
        losses = losses + weight * extra[name].float()
    return losses


def refuse_detached(losses: Tensor, objective: Any) -> None:
    """Raise ConfigError for losses without a gradient."""
    if not losses.requires_grad:
        why = "returns losses that are detached from the network (detach, no_grad, item, numpy)"
        raise ConfigError([f"{title_of(objective)} {why}; no weight would be trained"])


def title_of(objective: Any) -> str:
    """Name an objective in messages, by its registered name if it has one."""
    if objective is None:
        return "the network's loss"
    for name, entry in register.objective.items():
        if entry is objective or entry is type(objective):
            return f"objective={name}"
    return getattr(objective, "__name__", type(objective).__name__)


def mixing_problem(network: Network, objective: Any, auxiliary: dict[str, float]) -> str | None:
    """Compare the losses of two tables in one pack with the losses of each table alone.

    The losses are computed in evaluation and in training mode, from predictions in evaluation mode.

    Parameters
    ----------
    network : Network
        The network, on any device; no random state changes.
    objective : Objective or None
        What training minimizes.
    auxiliary : dict
        Weights of auxiliary losses.

    Returns
    -------
    str or None
        What is wrong, in one line: a difference, a changed pack, or losses of another form; None if nothing is.
    """
    device = next(network.parameters()).device
    was_training = network.training
    try:
        # Random numbers come from a copy of the generators, and the mode is restored at the end.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for training in (False, True):
                difference = mixing_difference(network, objective, auxiliary, training)
                if difference is not None:
                    mode = " in training mode" if training else ""
                    return (
                        f"{title_of(objective)} of two tables differs by {difference:.2g}{mode} between one pack and "
                        "two; it must be normalized within each table, since packs are halved and divided among ranks"
                    )
    except ConfigError as error:
        return str(error)
    finally:
        network.train(was_training)
    return None


def mixing_difference(network: Network, objective: Any, auxiliary: dict[str, float], training: bool) -> float | None:
    """Return by how much the loss of a table depends on the other table of its pack.

    Parameters
    ----------
    network : Network
        The network.
    objective : Objective or None
        What training minimizes.
    auxiliary : dict
        Weights of auxiliary losses.
    training : bool
        Whether losses are computed in training mode.

    Returns
    -------
    float or None
        The largest difference; None if it is within rounding.

    Raises
    ------
    ConfigError
        If the objective changes the pack, or returns losses of another form or without a gradient.
    """
    # Two pairs of equally large tables.
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tables = []
    for X, y, n in random_tables(network.config, ((12, 7, 2), (20, 9, 2)) * 2, generator):
        tables.append((X.to(device), y.to(device), n))

    def losses(*numbers: int, seed: int = 0) -> Tensor:
        # The predictions of these tables in one pack.
        pack = Pack.of([tables[number] for number in numbers])
        network.eval()
        with torch.no_grad():
            outputs = network(pack)
        predictions = outputs[0] if isinstance(outputs, tuple) else outputs
        network.train(training)
        # Their losses. Remember the pack, to see whether the objective changes it.
        # Versions count all changes except those through .data, which copies reveal.
        before = {"X": pack.X, "y": pack.y}
        versions = {name: tensor._version for name, tensor in before.items()}
        copies = {name: tensor.clone() for name, tensor in before.items()}
        torch.manual_seed(seed)
        with torch.set_grad_enabled(training):
            predictions.requires_grad_(training)
            table_losses = losses_from(outputs, network, pack, objective, auxiliary)
        if training:
            refuse_detached(table_losses, objective)
        for name, tensor in before.items():
            is_same = getattr(pack, name) is tensor and tensor._version == versions[name]
            if not is_same or not torch.equal(tensor, copies[name]):
                what = f"changes {name} of the pack, which holds the tables of the step"
                raise ConfigError([f"{title_of(objective)} {what}; change a copy, pack.{name}.clone()"])
        return table_losses.detach().float()

    # Compare. If the losses depend on the seed, they draw random numbers, and as many for the other table only if it
    # has the same shape: then the other table is exchanged instead of left out.
    together = losses(0, 1)
    largest = max(1.0, together.abs().max().item())
    if (losses(0, 1, seed=1) - together).abs().max() <= TOLERANCE * largest:
        others = torch.cat([losses(0), losses(1)])
    else:
        others = torch.stack([losses(0, 3)[0], losses(2, 1)[1]])
    difference = (together - others).abs().max().item()
    # NaN is reported elsewhere.
    return difference if difference > TOLERANCE * largest else None


register.objective("cross_entropy", CrossEntropy)
register.objective("pinball", Pinball)
