"""tabicl-evaluate with a network that predicts numbers."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from command_line import command
from made_run import make_run
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import ShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tiny_network import TINY, TINY_REGRESSOR, tiny_network

from tabicl_train import TabICLRegressor
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.evaluate import evaluate, score_task
from tabicl_train.evaluation.scores import LEVELS, score_numbers
from tabicl_train.evaluation.suites import make_number_task
from tabicl_train.prediction.public_format import save_public

METHODS = ["this model", "ridge regression", "random forest", "gradient boosting", "marginal quantiles"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "numbers.ckpt"
    save_public(TINY_REGRESSOR, tiny_network(TINY_REGRESSOR).state_dict(), path)
    return str(path)


def write_task(folder: Path, **columns) -> None:
    """A folder with a table of 60 rows that has two tasks: one with the target `price`, one with `kind`."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=list("abc"))
    frame = frame.assign(price=3 * frame["a"] + rng.normal(size=60), kind=np.resize(["x", "y"], 60))
    frame.assign(**columns).to_csv(folder / "data.csv", index=False)
    (folder / "tasks.csv").write_text("task,item,target\nprices,data.csv,price\nkinds,data.csv,kind\n")


def test_tables_csv_and_figure_of_the_bundled_set(checkpoint, tmp_path):
    result = command(
        "evaluate", f"checkpoint={checkpoint}", f"output={tmp_path}/rows.csv", f"figure={tmp_path}/figure.png",
        "splits=2", "rows=200", "n_estimators=2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert list(rows["method"]) == METHODS * 2 and set(rows["data"]) == {"diabetes"} and "classes" not in rows
    assert set(zip(rows["rows"], rows["labeled_rows"], rows["features"], strict=True)) == {(200, 140, 10)}
    of = rows.groupby("method")[["r2", "coverage"]].mean()
    assert of.loc["ridge regression", "r2"] > 0.3 and abs(of.loc["marginal quantiles", "coverage"] - 0.8) < 0.1
    lines = [line for line in result.stdout.splitlines() if line]
    (last,) = [k for k, line in enumerate(lines) if line.startswith("means of 1 task ")]
    assert [line[: len(m)] for line, m in zip(lines[last + 1 :], METHODS, strict=True)] == METHODS
    assert lines[last + 2].split()[2] == f"{of.loc['ridge regression', 'r2']:.3f}"
    image = matplotlib.image.imread(tmp_path / "figure.png")
    assert image.shape[0] > 500 and image.std() > 0.05


def test_scores_are_those_of_the_methods_on_the_split():
    frame = load_diabetes(as_frame=True).frame
    network = tiny_network(TINY_REGRESSOR)
    models = {"ours": lambda: TabICLRegressor(network, 1), "ridge": lambda: make_pipeline(StandardScaler(), Ridge())}
    rows = score_task(make_number_task("diabetes", frame * 1e9, "target"), models, splits=2)
    X, y = frame.drop(columns="target").to_numpy(), frame["target"].to_numpy()
    for split, (train, query) in enumerate(ShuffleSplit(2, test_size=0.3, random_state=0).split(X)):
        ours, ridge = rows[2 * split : 2 * split + 2]
        expected = r2_score(y[query], models["ridge"]().fit(X[train], y[train]).predict(X[query]))
        assert ridge["r2"] == pytest.approx(expected) and np.isnan(ridge["pinball"])
        model = models["ours"]().fit(X[train], y[train])
        mean, quantiles = model.predict(X[query]), model.predict_quantiles(X[query], LEVELS)
        center, scale = y[train].mean(), y[train].std()
        scores = score_numbers((y[query] - center) / scale, (mean - center) / scale, (quantiles - center) / scale)
        assert {name: ours[name] for name in scores} == pytest.approx(scores, rel=1e-4)


def test_all_methods_see_the_same_labeled_rows_and_standardized_targets():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"row": np.arange(100.0), "price": 1e12 * rng.gamma(2, size=100)})
    seen: dict[str, list] = {}

    class Watcher:
        def __init__(self, name):
            self.name = name

        def fit(self, X, y):
            seen.setdefault(self.name, []).append((X["row"].to_list(), y.tolist()))
            assert np.isclose(y.mean(), 0) and np.isclose(y.std(), 1)
            return self

        def predict(self, X):
            assert not set(X["row"]) & set(seen[self.name][-1][0])
            return np.zeros(len(X))

    task = make_number_task("t", frame, "price")
    rows = score_task(task, {name: lambda name=name: Watcher(name) for name in ("a", "b")}, splits=3)
    assert seen["a"] == seen["b"] and len(seen["a"]) == 3 and len(seen["a"][0][0]) == 70
    assert seen["a"][0] != seen["a"][1] and max(row["r2"] for row in rows) <= 0


def test_a_target_of_words_is_one_message_that_names_the_task(checkpoint, tmp_path, capsys):
    write_task(tmp_path, price=np.where(np.arange(60) == 3, np.inf, np.arange(60) * 1e-12))
    results = evaluate(**vars(EvaluateOptions(
        checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, n_estimators=1
    )))  # fmt: skip
    assert set(results["data"]) == {"prices"} and set(results["rows"]) == {59} and results["r2"].notna().all()
    errors = capsys.readouterr().err
    assert "prices: 1 row with a missing or infinite target left out" in errors
    assert errors.count("kinds is skipped: kind does not hold numbers, and the network predicts numbers") == 2


def test_a_constant_target_is_one_message_that_names_the_task(checkpoint, tmp_path, capsys):
    write_task(tmp_path, price=0.1)
    with pytest.raises(ConfigError, match="no task could be scored"):
        evaluate(**vars(EvaluateOptions(checkpoint=checkpoint, suite="folder", folder=str(tmp_path))))
    assert "prices is skipped: the target of all 42 labeled rows of a split is 0.1\n" in capsys.readouterr().err


def test_the_public_client_scores_as_we_do(checkpoint, tmp_path):
    pytest.importorskip("tabicl")
    write_task(tmp_path, kind=np.random.default_rng(1).normal(size=60))  # the client would place words first
    results = evaluate(**vars(EvaluateOptions(
        checkpoint=checkpoint, suite="folder", folder=str(tmp_path), splits=1, n_estimators=1, client_weights=checkpoint
    )))  # fmt: skip
    assert list(results["method"]) == [*METHODS, "public client"] * 2
    ours, client = (results[results["method"] == m] for m in ("this model", "public client"))
    for name in ("r2", "rmse", "pinball", "coverage", "width"):
        assert list(client[name]) == pytest.approx(list(ours[name]), abs=1e-4), name


def test_client_weights_for_classes_are_refused(checkpoint, tmp_path):
    pytest.importorskip("tabicl")
    classes = str(tmp_path / "classes.ckpt")
    save_public(TINY, tiny_network().state_dict(), classes)
    for own, other, words in (
        (checkpoint, classes, "predicts classes, and the checkpoint numbers"),
        (classes, checkpoint, "predicts numbers, and the checkpoint classes"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(**vars(EvaluateOptions(checkpoint=own, client_weights=other)))


def test_client_weights_of_a_run_are_refused(checkpoint, tmp_path):
    pytest.importorskip("tabicl")
    make_run(tmp_path / "my run", "task=regression", "model.num_quantiles=99")
    (weights,) = (tmp_path / "my run" / "checkpoints").glob("step-*.ckpt")
    with pytest.raises(ConfigError, match=rf"export it: tabicl-export 'checkpoint={weights}' output=FILE\.ckpt$"):
        evaluate(**vars(EvaluateOptions(checkpoint=checkpoint, client_weights=str(weights))))


def test_it_knows_the_trained_range_of_a_run(tmp_path):
    make_run(tmp_path / "run", "task=regression", "model.num_quantiles=99")
    results = evaluate(**vars(EvaluateOptions(checkpoint=str(tmp_path / "run"), splits=1, rows=50, n_estimators=1)))
    assert set(results["trained_range"]) == {"outside"}  # 10 features, trained on up to 6
