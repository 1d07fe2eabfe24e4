"""Where the time of an accepted table goes: CPU time by component of the prior and by phase, and rejected draws.

python tests/benchmarks/profile_prior.py [experiment=demo] [stage=short] [tables=200]
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from priors.mix_scm import MixSCM
from priors.prior import Prior
from priors.random import Seed, one_thread, rng_at
from priors.table import TableSpec
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig, configured_prior
from tabicl_train.stream.curriculum import draw_spec

PHASES = {"plan": "plan", "execute": "execute", "finished": "finish", "accept": "check"}  # methods of a prior


@dataclass
class Profile:
    """CPU seconds of each accepted table of a component, seconds of each phase, and rejected draws by reason."""

    seconds: list[float] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    first: int = 0  # number of tables accepted at the first attempt

    def line(self) -> str:
        tables = len(self.seconds)
        phases = [f"{1e3 * self.phases[name] / tables:8.2f}" for name in PHASES.values()]
        reasons = [f"{count / tables:.2f} {reason}" for reason, count in self.rejections.most_common()]
        total = f"{1e3 * sum(self.seconds) / tables:8.2f}"
        attempts = f"{1 + self.rejections.total() / tables:8.2f} {self.first / tables:8.0%}"
        return f"{tables:6} {total} {' '.join(phases)} {attempts}  {', '.join(reasons)}"


def specs_of(config: RunConfig, stage: str, seed: int = 0) -> Iterator[tuple[TableSpec, Seed]]:
    """Yield the specifications of the tables of a stage, in groups as in training, and their addresses."""
    settings = config.curriculum.stages[stage]
    step = 0
    while True:
        spec = draw_spec(settings, config.model.max_classes, rng_at("stage of a benchmark", seed, step))
        for table in range(settings.group_size):
            yield replace(spec, group_seed=(seed, step)), (seed, step, table)
        step += 1


def timed(method: Callable, phase: str, spent: Counter[str]) -> Callable:
    """Return a method that adds its CPU seconds to a phase."""

    def call(*args):
        start = time.process_time()
        try:
            return method(*args)
        finally:
            spent[phase] += time.process_time() - start

    return call


def profile(prior: Prior, specs: Iterator[tuple[TableSpec, Seed]], tables: int) -> dict[str, Profile]:
    """Draw tables and return the profile of each component, after five tables to warm up."""
    prior.import_loops()  # 2 CPU seconds of each process, which the first tables that need them would count
    spent: Counter[str] = Counter()
    for component in prior.priors.values() if isinstance(prior, MixSCM) else [prior]:
        for name, phase in PHASES.items():
            method = getattr(type(component), name).__get__(component)  # not that of an earlier profile
            setattr(component, name, timed(method, phase, spent))
    profiles: defaultdict[str, Profile] = defaultdict(Profile)
    for index in range(tables + 5):
        spec, seed = next(specs)
        spent.clear()
        start = time.process_time()
        table = prior.sample(spec, seed)
        seconds = time.process_time() - start
        if index < 5:
            continue
        for name in ("all", table.source[0] if table.source else "alone"):
            profiles[name].seconds.append(seconds)
            profiles[name].phases.update(spent)
            profiles[name].rejections.update(table.rejections)
            profiles[name].first += not table.rejections
    return profiles


if __name__ == "__main__":
    args = {"experiment": "demo", "stage": "short", "tables": "200"}
    args |= dict(argument.split("=") for argument in sys.argv[1:])
    config = compose([f"experiment={args['experiment']}"])
    with one_thread():
        profiles = profile(configured_prior(config.prior), specs_of(config, args["stage"]), int(args["tables"]))
    titles = ["ms/table", *PHASES.values(), "attempts", "at first"]
    print(f"{'component':10} tables {' '.join(f'{title:>8}' for title in titles)}  rejected draws of a table")
    for name, found in sorted(profiles.items()):
        print(f"{name:10} {found.line()}")
