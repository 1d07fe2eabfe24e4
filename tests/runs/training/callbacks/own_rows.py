"""A prior of one real table, kept in memory: the rows that training labels, and query rows of three kinds."""

import contextlib
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch

import priors
from priors.prior import Prior
from priors.random import rng_at
from priors.real import RealTables
from priors.table import Table
from tabicl_train.config.compose import compose
from tabicl_train.training import loop

NAME, ROWS = "own_rows", 320
SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=8", "checkpoint.every=2",
    "trainer.accelerator=cpu", "model.row_num_blocks=1", "model.icl_num_blocks=1",
    "validation.every=2", "validation.rows=[40,60]", "validation.tables=6",
    "validation.features=[2,4]", "validation.suites=[]", "validation.best=synthetic",
]  # fmt: skip


@dataclass
class OwnRows(Prior, RealTables):
    """Query rows have numbers of which the remainder by 4 is `side`: 1 in training, 2 in validation, 3 in the test;
    those with remainder 0 are labeled. The first column is the row's number by 100."""

    kind_of_clusters = "rows"
    side = 1

    def for_validation(self) -> Prior:
        return self.of(2)

    def for_test(self) -> Prior:
        return self.of(3)

    def of(self, side: int) -> Prior:
        other = replace(self)
        other.side = side
        return other

    def fingerprint(self) -> str:
        return "own rows"

    def clusters(self, table: Table) -> list:
        return table.plan

    def attempt(self, spec, seed) -> Table:
        rng, labels = rng_at(seed), np.random.default_rng(0).random(ROWS) < 0.3
        numbers = np.arange(0, ROWS, 4)
        rows = np.concatenate([rng.choice(numbers + s, n) for s, n in
                               ((0, spec.train_size), (self.side, spec.num_rows - spec.train_size))])  # fmt: skip
        X = torch.from_numpy(np.stack([rows / 100, labels[rows]], 1)).float()
        y = torch.from_numpy(labels[rows].astype(int))
        return Table(X, y, spec.train_size, 2, rows[spec.train_size :].tolist(), source=(NAME, "rows"))


@contextlib.contextmanager
def installed():
    """Within the context `own_rows` is the name of the prior."""
    known = priors.prior_class
    with mock.patch.object(priors, "prior_class", lambda name: OwnRows if name == NAME else known(name)):
        yield


def configured(run_dir, *overrides: str, best: str = "own", **prior):
    """The configuration of a run of this prior, or of another one with these options."""
    config = compose([*SETTINGS, f"run_dir={run_dir}", *overrides])
    validation = replace(config.validation, best=best)
    return replace(config, prior=prior or {"name": NAME}, validation=validation)


def train_on_own_rows(run_dir, *overrides: str, best: str = "own", callbacks: tuple = (), **prior) -> str:
    with installed():
        return loop.train(configured(run_dir, *overrides, best=best, **prior), callbacks)
