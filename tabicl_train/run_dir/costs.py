"""The counted costs of a run's network, kept from its first start: they decide which tables share a rank and a pass.

Networks with formulas of their own, such as TabICL, have none.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabicl_train import register
from tabicl_train.config.schema import RunConfig
from tabicl_train.model.config import family_name, family_of
from tabicl_train.model.counting import Costs, counted_costs, use_costs
from tabicl_train.model.family import counted
from tabicl_train.run_dir.records import Records

__all__ = ["costs_of_run", "record_costs"]

FILE = "costs.json"


def costs_of_run(config: RunConfig) -> Costs | None:
    """Return the counted costs of the network of a run, and use them in this process.

    Those of the first start are read from the run directory. They are counted if the run is new, or if its network
    has changed since.

    Parameters
    ----------
    config : RunConfig
        The run.

    Returns
    -------
    Costs or None
        None if the network has formulas.
    """
    network = family_of(config.model)
    if not counted(network):
        return None
    recorded = Records(Path(config.run_dir)).json(FILE) or {}
    if recorded.get("network") == counted_network(config):
        costs = Costs(tuple(recorded["flops"]), tuple(recorded["kept"]))
    else:
        costs = counted_costs(network, config.model)
    use_costs(network, config.model, costs)
    return costs


def record_costs(records: Records, config: RunConfig, costs: Costs | None) -> None:
    """Write the counted costs of a run for its later starts; nothing without any."""
    if costs is not None:
        recorded = {"network": counted_network(config), **asdict(costs)}
        records.replace(FILE, json.dumps(recorded, indent=1) + "\n")


def counted_network(config: RunConfig) -> dict[str, Any]:
    """Describe the network whose costs were counted: its settings, and its code if that is a plug-in's."""
    name = family_name(type(config.model))
    plugin = register.network.plugin(name)
    return {
        "family": name,
        "settings": repr(config.model),
        "plugin": None if plugin is None else plugin.sha256,
    }
