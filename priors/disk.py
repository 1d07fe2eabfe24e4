"""disk: tables that another prior drew and `tabicl-prior dump` stored, for the same curriculum and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from priors.prior import Prior
from priors.random import Seed, as_seed
from priors.storage import Shard, read_table, shard_paths, tables_of_steps
from priors.table import PriorError, Table, TableSpec

__all__ = ["Disk"]


@dataclass
class Disk(Prior):
    """Stored tables."""

    numeric_targets = True  # if tables of them were dumped

    folder: str = ""
    """The folder that `tabicl-prior dump output=FOLDER` wrote the tables to."""

    def problems(self) -> list[str]:
        """Return everything wrong with the options."""
        if not self.folder:
            return ["folder is not set; it is the folder that tabicl-prior dump wrote its shards to"]
        if not Path(self.folder).is_dir():
            return [f"folder is {self.folder!r}; there is no such folder"]
        if not shard_paths(Path(self.folder)):
            return [f"folder is {self.folder!r}; there are no shards in it"]
        return []

    @cached_property
    def shard_size(self) -> int:
        """Steps of a shard."""
        return int(Shard(shard_paths(Path(self.folder))[0]).metadata["shard_size"])

    def mixed(self, mix: Mapping[str, float]) -> Disk:
        """Return the prior itself: a table is stored with the shares that it was drawn with, and they are compared."""
        return self

    def missing_steps(self, seed: int, tables: Sequence[int]) -> list[str]:
        """Say why a run cannot get all its tables; tables: their number in every step of the run, from step 0 on."""
        try:
            stored = tables_of_steps(Path(self.folder), seed)
        except PriorError as error:
            return [f"folder is {self.folder!r}; {error}"]
        missing = [step for step, count in enumerate(tables) if stored[step] < count]
        if not missing:
            return []
        first = missing[0] // self.shard_size * self.shard_size
        steps = (missing[-1] // self.shard_size + 1) * self.shard_size - first  # whole shards
        return [
            f"folder is {self.folder!r}; tables of {len(missing)} of the run's {len(tables)} steps are missing, in "
            f"{missing[0]}..{missing[-1]} (tabicl-prior dump first_step={first} steps={steps} writes them)"
        ]

    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """Return the table that was dumped at the address (seed, step, table); its plan is a text."""
        spec.check()
        address = as_seed(seed)
        if len(address) != 3:
            raise PriorError(f"the address is {address}; tables on disk have addresses (seed, step, table)")
        return read_table(Path(self.folder), self.shard_size, address, spec)
