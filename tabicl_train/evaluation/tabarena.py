"""A pretrained network on the classification tasks of TabArena (arXiv 2506.16791), through its public package.

Install the package and this one into a separate Python environment, then run

    from tabarena.benchmark.experiment import TabArenaV0pt1ExperimentBundle
    from tabarena.contexts import TabArenaContext
    from tabarena.utils.config_utils import SystemConfigGenerator
    from tabicl_train.evaluation.tabarena import TabICLSystem

    system = SystemConfigGenerator(TabICLSystem, name="TabICLTrain", manual_configs=[{"model": "/path/to/run"}])
    bundle = TabArenaV0pt1ExperimentBundle(models=[(system, 0)], system_experiments=True)
    arena = TabArenaContext()
    arena.build_and_run_jobs(
        bundle.build_experiments(time_limit=3600), expname="/path/to/results", subset=["classification", "lite"]
    )
    print(arena.compare(output_dir="/path/to/leaderboard"))

This downloads the tasks, runs the first split of each ("lite"; omit it to run all splits), and compares the results
with the published ones of other methods. Written for tabarena 0.1.0.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from tabarena.benchmark.exec_models import ExternalSystemModel

from tabicl_train.prediction.classifier import TabICLClassifier


class TabICLSystem(ExternalSystemModel):
    """A TabICLClassifier for TabArena; `model` is a path, since TabArena writes its experiments to files."""

    def __init__(self, *, model: str, n_estimators: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model, self.n_estimators = model, n_estimators

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
        if problem_type == "regression":
            raise ValueError("The network is a classifier; leave out regression tasks")
        device = None if num_gpus is None or num_gpus > 0 else "cpu"
        classifier = TabICLClassifier(
            self.model, n_estimators=self.n_estimators, device=device, random_state=random_state or 0
        )
        self.classifier = classifier.fit(X, y)
        return self

    def _predict_proba(self, X: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(self.classifier.predict_proba(X), index=X.index, columns=self.classifier.classes_)
