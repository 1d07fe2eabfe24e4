"""Probes: what their tables hold, what is possible on them, and how they are evaluated."""

from itertools import product

import numpy as np
import pytest
from networks import TINY, TINY_REGRESSOR, tiny_network

from tabicl_train.config.options import EvaluateOptions
from tabicl_train.config.schema import NUMBER_SCORES
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation import evaluate as evaluation
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES
from tabicl_train.evaluation.evaluate import score_task, split_problems, stored_scores
from tabicl_train.evaluation.probes import DRAWS, KINDS, POSSIBLE, Probe, probe_of
from tabicl_train.evaluation.suites import sources
from tabicl_train.report.figures import draw_probes
from tabicl_train.training.callbacks.scores import score_in_validation, suite_tasks
from tabicl_train.weights.export import save_public


@pytest.mark.parametrize("name", KINDS)
def test_signals_have_mean_0_and_variance_1(name):
    """Otherwise the R2 that is possible is not 0.9, and the slope of the classes means something else."""
    kind = KINDS[name]
    rng = np.random.default_rng(0)
    signals = np.concatenate([kind.draw(rng, 2000)[1] for _ in range(20)])
    # Random effects differ between levels, of which the rows do not have the same number.
    assert abs(signals.mean()) < 0.05 and abs(signals.var() - 1) < 0.06
    assert kind.noise(rng, 50_000).std() == pytest.approx(1 / 3, rel=0.1)
    if name == "rare":
        assert kind.probability(signals).mean() == pytest.approx(0.03, abs=0.003)


def test_draws_are_fixed_and_differ():
    first, second = (Probe("lookup", 50, numbers=True) for _ in range(2))
    draws = list(first.splits(3))
    assert all(a.X.equals(b.X) and (a.y == b.y).all() for a, b in zip(draws, second.splits(3), strict=True))
    assert not draws[0].X.equals(draws[1].X)
    assert not draws[0].X.equals(Probe("lookup", 50, numbers=False).X)
    assert draws[2].y[:3] == pytest.approx([0.8925480283, -0.9995896887, -0.6069500604])
    assert first.name == "lookup (50)" and probe_of(first.name) == "lookup"
    assert first.sizes == {"labeled_rows": 50, "features": 7}
    assert len(draws[0].labeled) == 50
    assert not set(draws[0].labeled) & set(draws[0].query)


class Knowing:
    """Knows the rule of XOR."""

    def fit(self, X, y):
        return self

    def predict_proba(self, X):
        p = KINDS["xor"].probability(np.sign(X["x0"] * X["x1"]))
        return np.column_stack([1 - p, p])


def test_what_is_possible_is_the_score_of_the_known_rule():
    probe = Probe("xor", 50, numbers=False)
    scored = score_task(probe, {"knowing": Knowing}, splits=3)
    for row in scored:
        best = probe.possible(row["split"])
        assert all(row[metric] == pytest.approx(best[metric]) for metric in ("roc_auc", "log_loss", "accuracy"))
    of_numbers = [Probe("heavy tails", 200, numbers=True).possible(split) for split in range(5)]
    assert np.mean([row["r2"] for row in of_numbers]) == pytest.approx(0.9, abs=0.03)
    assert np.mean([row["coverage"] for row in of_numbers]) == pytest.approx(0.8, abs=0.02)


def test_a_rare_class_is_in_every_draw():
    for split in Probe("rare", 200, numbers=False).splits(DRAWS):
        assert min(split.y[split.labeled].sum(), split.y[split.query].sum()) >= 2


def test_probes_of_a_network(tmp_path, monkeypatch, capsys):
    checkpoint = tmp_path / "tiny.ckpt"
    save_public(TINY, tiny_network().state_dict(), checkpoint)
    chosen = [source for source in sources("probes", None) if source.name in ("xor (50)", "xor (200)", "steps (50)")]
    monkeypatch.setattr(evaluation, "sources", lambda *_: chosen)
    results = evaluation.evaluate(EvaluateOptions(checkpoint=str(checkpoint), suite="probes", splits=2, n_estimators=1))
    assert results.groupby("data").size().nunique() == 1
    assert set(results["split"]) == {0, 1}
    assert {"this model", POSSIBLE, *BASELINES} <= set(results["method"])
    assert "on 3 probes" in capsys.readouterr().out.splitlines()[-1]
    figure = draw_probes(results)
    assert [axes.get_title() for axes in figure.axes] == ["xor", "steps"]


@pytest.mark.parametrize("numbers", [False, True])
def test_stored_scores_hold_every_draw(numbers):
    """Those of CatBoost, which take hours, are of the first draws of all probes."""
    stored = stored_scores(EvaluateOptions(suite="probes"), numbers)
    names = [source.name for source in sources("probes", None, numbers)]
    assert {*(NUMBER_BASELINES if numbers else BASELINES), "CatBoost"} == set(stored["method"])
    for method, rows in stored.groupby("method"):
        draws = rows["split"].nunique()
        assert draws == DRAWS or method == "CatBoost"
        assert set(zip(rows["data"], rows["split"], strict=True)) == set(product(names, range(draws))), method
    linear, metric = ("ridge regression", "r2") if numbers else ("logistic regression", "roc_auc")
    baselines = NUMBER_BASELINES if numbers else BASELINES
    fitted = score_task(Probe("10 levels", 200, numbers), {linear: baselines[linear]}, splits=DRAWS, first=DRAWS - 1)
    of_linear = stored[(stored["method"] == linear) & (stored["data"] == "10 levels (200)")].set_index("split")
    assert [row[metric] for row in fitted] == pytest.approx([of_linear[metric][DRAWS - 1]], abs=1e-3)


def test_options_of_probes():
    assert split_problems(EvaluateOptions(suite="probes", splits=21, rows=500), sources("probes", None)) == [
        "splits is 21; a task of suite=probes has only 20",
        "rows is 500; suite=probes has its own numbers of rows",
    ]
    with pytest.raises(ConfigError, match="folder is 'x'"):
        sources("probes", "x")


def test_probes_during_training():
    """Those of about 200 labeled rows; of numbers without the rare class, and scored by the columns of numbers."""
    of_classes = {probe.probe: probe.labeled_rows for probe in suite_tasks(("probes",), False)}
    assert of_classes == {name: 1000 if name == "smooth" else 200 for name in KINDS}
    of_numbers = {probe.probe: probe for probe in suite_tasks(("probes",), True)}
    assert list(of_numbers) == [name for name in KINDS if name != "rare"]

    probe = of_numbers["10 levels"]
    scored = score_in_validation(tiny_network(TINY_REGRESSOR), probe)
    assert scored.data == "probe 10 levels"
    assert scored.sizes == probe.sizes
    assert set(scored.scores) < set(NUMBER_SCORES)
    assert scored.scores["possible"] == probe.possible(0)["r2"]
    assert np.isfinite(list(scored.scores.values())).all()
