"""Pretrained networks on the tasks of TabArena (arXiv 2506.16791), through its public package.

Install the package and this one into a separate Python environment, then run

    from tabarena.benchmark.experiment import TabArenaV0pt1ExperimentBundle
    from tabarena.contexts import TabArenaContext
    from tabarena.utils.config_utils import SystemConfigGenerator
    from tabicl_train.evaluation.tabarena import TabICLSystem

    networks = {"model": "/path/to/classifier.ckpt", "regressor": "/path/to/regressor.ckpt"}
    system = SystemConfigGenerator(TabICLSystem, name="TabICLTrain", manual_configs=[networks])
    bundle = TabArenaV0pt1ExperimentBundle(models=[(system, 0)], system_experiments=True)
    arena = TabArenaContext()
    arena.build_and_run_jobs(bundle.build_experiments(time_limit=3600), expname="/path/to/results", subset=["lite"])
    print(arena.compare(output_dir="/path/to/leaderboard"))

This downloads the tasks, runs the first split of each ("lite"; omit it to run all splits), and compares the results
with the published ones of other methods. With one network only, give subset=["classification", "lite"] or
["regression", "lite"]. Written for tabarena 0.1.0. What a submission needs is on the page OPENML.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from tabarena.benchmark.exec_models import ExternalSystemModel

from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.regressor import TabICLRegressor


class TabICLSystem(ExternalSystemModel):
    """A TabICLClassifier and a TabICLRegressor for TabArena.

    Parameters
    ----------
    model : str, optional
        Path or name of the weights of a classifier. TabArena writes its experiments to files, so it is no network.
    regressor : str, optional
        The same of a regressor, for numeric targets.
    n_estimators : int
        Ensemble members.
    """

    def __init__(
        self, *, model: str | None = None, regressor: str | None = None, n_estimators: int = 8, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.model, self.regressor, self.n_estimators = model, regressor, n_estimators

    def _fit_system(
        self,
        X: pd.DataFrame,
        y: pd.Series,
        *,
        problem_type: str,
        num_gpus: int | None,
        random_state: int | None,
        **_: Any,
    ) -> TabICLSystem:
        is_regression = problem_type == "regression"
        weights = self.regressor if is_regression else self.model
        if weights is None:
            option = "regressor" if is_regression else "model"
            raise ValueError(f"The task is of the type {problem_type}, and there is no {option}")
        make = TabICLRegressor if is_regression else TabICLClassifier
        device = None if num_gpus is None or num_gpus > 0 else "cpu"
        estimator = make(weights, n_estimators=self.n_estimators, device=device, random_state=random_state or 0)
        if is_regression:
            y = y.astype(np.float64)
        self.estimator = estimator.fit(X, y)
        return self

    def _predict(self, X: pd.DataFrame) -> pd.Series:
        return pd.Series(self.estimator.predict(X), index=X.index)

    def _predict_proba(self, X: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(self.estimator.predict_proba(X), index=X.index, columns=self.estimator.classes_)
