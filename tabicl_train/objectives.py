"""What training minimizes: one loss for each table of a pack, from the predictions of the network.

An objective is normalized within each table, so a pack may be halved, and tables may move to another rank, without a
change. Without `objective=` a network's own loss is minimized, and validation reports that loss in any case.

B tables, C classes, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tabicl_train import register
from tabicl_train.config import build
from tabicl_train.config.schema import one_of
from tabicl_train.model.family import Network, random_tables
from tabicl_train.model.pack import Pack
from tabicl_train.model.quantiles import pinball

__all__ = ["CrossEntropy", "Objective", "Pinball", "build_objective", "losses_of", "mixing_problem"]

CLASS_WEIGHTS = ("none", "balanced")
TOLERANCE = 1e-4  # of the losses of two tables together and alone, relative to the larger one


class Objective:
    """The base of objectives, dataclasses whose fields are their options."""

    def __call__(self, predictions: Tensor, pack: Pack, network: Network) -> Tensor:
        """Compute the loss of each table.

        Parameters
        ----------
        predictions : Tensor
            As from the network, (query rows of all tables, outputs).
        pack : Pack
            The tables; `network.targets(pack)` are the labels of the query rows.
        network : Network
            The network; `network.means(values, pack)` averages over the query rows of each table.

        Returns
        -------
        Tensor
            (B,) float32.
        """
        raise NotImplementedError

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        return []


@dataclass
class CrossEntropy(Objective):
    """Cross entropy of logits.

    References
    ----------
    Szegedy et al., Rethinking the Inception architecture, arXiv 1512.00567, section 7 (label smoothing).
    """

    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all outputs of the network, in [0, 1)."""
    class_weights: str = "none"
    """none (all query rows of a table count equally), or balanced (all classes among its query rows do)."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        problems = one_of("class_weights", self.class_weights, CLASS_WEIGHTS)
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1)")
        return problems

    def __call__(self, predictions: Tensor, pack: Pack, network: Network) -> Tensor:
        """See `Objective`."""
        y = network.targets(pack)  # (query rows,)
        losses = F.cross_entropy(predictions.float(), y, reduction="none", label_smoothing=self.label_smoothing)
        if self.class_weights == "none":
            return network.means(losses, pack)
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
    """Pinball loss of quantiles, as in TabICLv2 (arXiv 2602.11139)."""

    def __call__(self, predictions: Tensor, pack: Pack, network: Network) -> Tensor:
        """See `Objective`."""
        return network.means(pinball(predictions, network.targets(pack)), pack)


def build_objective(settings: dict[str, Any] | None) -> Any:
    """Build the objective with these settings; None for the network's own loss."""
    if settings is None:
        return None
    options = {key: value for key, value in settings.items() if key != "name"}
    return build.build_objective(register.objective[settings["name"]], options)


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
        The network. Beside its predictions it may return auxiliary losses by name, each (B,).
    pack : Pack
        The tables.
    checkpoint_rows : int, optional
        See `Network.forward`.
    objective : Objective, optional
        By default the network's own loss.
    auxiliary : dict, optional
        Weights of the auxiliary losses by name; those that are not named do not count.
    predict : callable, optional
        What is called in place of the network, with the same arguments.

    Returns
    -------
    Tensor
        (B,) float32.
    """
    predictions = (predict or network)(pack, checkpoint_rows)
    extra: dict[str, Tensor] = {}
    if isinstance(predictions, tuple):
        predictions, extra = predictions
    losses = network.losses(predictions, pack) if objective is None else objective(predictions, pack, network)
    for name, weight in (auxiliary or {}).items():
        if name not in extra:
            has = f"it has {', '.join(extra)}" if extra else "it has none"
            raise ValueError(f"the network returns no auxiliary loss {name!r}; {has}")
        losses = losses + weight * extra[name].float()
    return losses


def mixing_problem(network: Network, objective: Any, auxiliary: dict[str, float]) -> str | None:
    """Compare the losses of two tables in one pack with those of the two alone.

    Parameters
    ----------
    network : Network
        The network, on any device; it is used in evaluation mode, and no random state changes.
    objective : Objective or None
        What training minimizes.
    auxiliary : dict
        Weights of auxiliary losses.

    Returns
    -------
    str or None
        The difference in one line; None if there is none.
    """
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tables = []
    for X, y, n in random_tables(network.config, ((12, 7, 2), (20, 9, 2)), generator):
        tables.append((X.to(device), y.to(device), n))
    was_training = network.training
    network.eval()
    with torch.no_grad():
        together = losses_of(network, Pack.of(tables), None, objective, auxiliary).float()
        alone = []
        for table in tables:
            alone.append(losses_of(network, Pack.of([table]), None, objective, auxiliary).float())
    network.train(was_training)
    what = "the network's loss" if objective is None else type(objective).__name__
    if together.shape != (2,):
        return f"{what} returns the shape {tuple(together.shape)} for a pack of two tables; it must be (2,)"
    difference = (together - torch.cat(alone)).abs().max().item()
    largest = max(1.0, together.abs().max().item())
    if math.isnan(difference) or difference <= TOLERANCE * largest:  # nan is reported elsewhere
        return None
    return (
        f"{what} of two tables in one pack differs by {difference:.2g} from that of the two alone; it must be "
        "normalized within each table, since packs are halved and divided among ranks"
    )


register.objective("cross_entropy", CrossEntropy)
register.objective("pinball", Pinball)
