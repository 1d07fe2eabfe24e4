"""A run in a folder as an object: its settings, curves, checkpoints and networks."""

from __future__ import annotations

import io
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from tabicl_train.config.schema import RunConfig
from tabicl_train.console import one_line
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError
from tabicl_train.model.family import Network
from tabicl_train.outputs import expand_home
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.regressor import TabICLRegressor
from tabicl_train.run import checkpoint
from tabicl_train.run.curves import rows_by_step
from tabicl_train.run.records import CONFIG, Records, csv_text
from tabicl_train.run.status import read_status
from tabicl_train.weights.reader import load_model, load_network

__all__ = ["SavedRun", "open_run"]

# Columns of text. They are read as such, since the name of a task may be 61.
TEXTS = ("stage", "data", "layer", "method", "trained_range", "weights")


def open_run(run_dir: str | Path) -> SavedRun:
    """Open the folder of a run, which may still be running, for reading.

    Parameters
    ----------
    run_dir : str or Path
        The run directory.

    Returns
    -------
    SavedRun
        The run. Its files are read again at each access, except for the configuration.

    Raises
    ------
    ConfigError
        If there is no run in the folder.

    Examples
    --------
    >>> run = open_run("runs/mine")
    >>> run.metrics.plot(x="step", y=["loss", "guess_loss"])  # needs matplotlib
    >>> run.estimator(n_estimators=1).fit(X, y).predict(queries)
    """
    folder = Path(expand_home(run_dir))
    if not holds_run(folder):
        raise ConfigError([f"run_dir is '{folder}'; there is no run in it"])
    return SavedRun(folder)


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder."""
    return (folder / CONFIG).is_file() or (folder / "metrics.csv").is_file()


class SavedRun:
    """A run, read from its run directory; see `open_run`.

    Tables do not have the rows of steps that the run has repeated, after a kill or a rewind. A table that the run does
    not have is empty.

    Attributes
    ----------
    folder : Path
        The run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = Records(folder)

    def __repr__(self) -> str:
        """Return the folder, the status and the steps done."""
        state = self.status or {"status": "of unknown status", "step": 0}
        return one_line(f"<run {self.folder}, {state['status']}, {state['step']:,} steps>")

    @property
    def settings(self) -> dict[str, Any] | None:
        """The content of config.yaml in plain values, readable without plug-ins; None if the file is missing."""
        return self.records.config()

    @cached_property
    def config(self) -> RunConfig:
        """The configuration, as `compose` returns it.

        Raises
        ------
        ConfigError
            If it cannot run here, in particular if a plug-in that it needs is not loaded.
        """
        from tabicl_train.config.compose import from_values  # on first use, since it imports Hydra

        settings = self.settings
        if settings is None:
            raise ConfigError([f"{self.folder / CONFIG} is missing"])
        try:
            return from_values(settings)
        except ConfigError:
            needed = self._plugins()
            kinds = {kind for record in needed for kind, _ in record["uses"]}
            plugins.require(needed, kinds, self.folder)
            raise

    @property
    def status(self) -> dict[str, Any] | None:
        """The status of the run, None if it is unknown.

        Keys: `status` (running, finished, preempted, failed or killed), `step` (steps done), `saved` (steps of the
        newest checkpoint), `cause` (why the run failed).
        """
        return read_status(self.folder)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run: step, time, command, commit, versions and machine of each, from provenance.jsonl."""
        return self.records.lines("provenance.jsonl")

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """Skipped steps, warnings and rewinds, from incidents.jsonl; their steps count from 0."""
        return self.records.lines("incidents.jsonl")

    @property
    def metrics(self) -> pd.DataFrame:
        """The training curves, a row for each logged step.

        Columns: step (steps done) and stage; loss, guess_loss (of guessing from labels alone), grad_norm (before
        clipping) and lr of that step; tables_per_s, cells_per_s, tflops_per_s, peak_share, data_wait, accept_rate and
        clipped since the previous row; skipped (steps so far) and memory_gb (peak so far).
        """
        return self.table("metrics.csv")

    @property
    def validation(self) -> pd.DataFrame:
        """The scores, a row for each validation and set of tables.

        Columns: step; data ("synthetic", "own", the name of a task of a suite, or "probe NAME") and rows, which name
        the set; loss, accuracy and roc_auc for classification, or loss, crps, rmse, r2 and coverage for regression;
        guess_loss; possible (for probes, the roc_auc or r2 that is possible); is_best (1 if the weights became the best
        ones); trained_range (inside or outside).
        """
        return self.table("validation.csv")

    @property
    def multipliers(self) -> pd.DataFrame:
        """The multipliers of the attention layers with a scaling rule, a row for each logged step and layer.

        Columns: step, stage, layer; n_smallest and n_largest (labeled rows of the step's tables), at_smallest and
        at_largest (the largest multiplier of the layer for them); gate_mean, gate_std.
        """
        return self.table("scaling.csv")

    @property
    def evaluation(self) -> pd.DataFrame:
        """The scores on real data that `tabicl-evaluate output=RUN_DIR/evaluation.csv` has written."""
        return self.table("evaluation.csv")

    @property
    def test(self) -> dict[str, Any] | None:
        """What a run with init_weights has gained, from test.json; None without such a test."""
        return self.records.checked_json("test.json")

    def table(self, name: str) -> pd.DataFrame:
        """Read any CSV file in the folder, without an incomplete last line and without repeated steps."""
        rows = Records((self.folder / name).parent).rows(Path(name).name)
        if not rows:
            return pd.DataFrame()
        if "step" in rows[0]:
            rows = []
            for rows_of_step in rows_by_step(self.folder, name).values():
                rows += rows_of_step
            if not rows:
                return pd.DataFrame()
        content = csv_text([rows[0], *(row.values() for row in rows)])
        return pd.read_csv(io.StringIO(content), dtype=dict.fromkeys(TEXTS, str))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints that the run keeps, by the number of steps done, ascending."""
        return {checkpoint.step_of(path): path for path in checkpoint.saved(self.folder / "checkpoints")}

    def network(self, weights: str | int | None = None) -> Network:
        """Load a network of the run.

        Parameters
        ----------
        weights : str or int, optional
            best (by validation), newest, ema (an average that the run keeps), or the step of a checkpoint. Default: the
            best if there are any, otherwise the newest. A line says which were taken.

        Returns
        -------
        Network
            A torch module in evaluation mode, on the CPU, in float32.

        Raises
        ------
        ConfigError
            If the run has no such weights, or needs a plug-in that is not loaded.
        """
        return load_network(*self._weights(weights))

    def estimator(self, weights: str | int | None = None, **options: Any) -> TabICLClassifier | TabICLRegressor:
        """Return a scikit-learn estimator with a network of the run.

        Parameters
        ----------
        weights : str or int, optional
            As for `network`.
        **options
            Options of the estimator other than `model`, such as n_estimators=1.

        Returns
        -------
        TabICLClassifier or TabICLRegressor
            The estimator for what the network predicts, not fitted.

        Raises
        ------
        ConfigError
            As for `network`, and for a network that predicts no real tables.
        """
        network = load_model(*self._weights(weights))
        if network.config.is_regression:
            return TabICLRegressor(network, **options)
        return TabICLClassifier(network, **options)

    def _weights(self, weights: str | int | None) -> tuple[Path, str | None]:
        """Return the file or folder that holds the weights, and which of them to take."""
        if not isinstance(weights, int):
            return self.folder, weights
        path = self.checkpoints.get(weights)
        if path is None:
            kept = ", ".join(str(step) for step in self.checkpoints) or "none"
            raise ConfigError([f"{self.folder} has no checkpoint of step {weights}; there are {kept}"])
        return path, None

    def _plugins(self) -> list[dict[str, Any]]:
        """Return the records of the run's plug-ins from the newest checkpoint."""
        newest = checkpoint.newest_valid(self.folder / "checkpoints")
        if newest is None:
            return []
        return newest[1].get("run", {}).get("plugins", [])
