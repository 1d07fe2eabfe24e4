"""Scaling laws of sweeps: the fit on made losses, what follows from it, and what is refused."""

import csv
import dataclasses

import numpy as np
import pandas as pd
import pytest
from html_page import Page
from test_results import invent

from tabicl_train.config.compose import compose, from_values
from tabicl_train.errors import ConfigError
from tabicl_train.planning import count_parameters, size_of
from tabicl_train.sweep.plan import make_plan
from tabicl_train.sweep.results import write_page
from tabicl_train.sweep.scaling_law import Law, fit_law, fit_scaling

TRUE = Law(E=0.45, A=8.0, a=0.35, B=6.0, b=0.4)
FLOPS = 6e3  # of a table, for each parameter
WIDTHS = "width: {a: [model.embed_dim=16], b: [model.embed_dim=32], c: [model.embed_dim=48]}"
LADDER = (
    "settings: [experiment=smoke, validation.every=5, 'validation.suites=[]']\n"
    f"space:\n  {WIDTHS}\n  curriculum.scale_steps: [0.25, 0.5, 1]\n"
    "scaling_law: true\nforecast: {long: [experiment=smoke, validation.every=5, curriculum.scale_steps=4]}\n"
)


def some_loss(point: dict, seed: int) -> float:
    return 1 / point["curriculum.scale_steps"] + 1 / "_abc".index(point["width"])


def points(noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for parameters in (2e5, 4e5, 7e5, 1.6e6):
        for flops in (2e12, 8e12, 3e13):
            tables = flops / (FLOPS * parameters)
            loss = TRUE.loss(parameters, tables) * np.exp(noise * rng.normal())
            rows.append({"parameters": parameters, "tables": tables, "flops": flops, "loss": loss})
    return pd.DataFrame(rows)


def test_a_fit_finds_the_constants_and_the_size_that_follows_from_them():
    made = points()
    law = fit_law(made.parameters, made.tables, made.loss)
    assert [law.E, law.A, law.a, law.B, law.b] == pytest.approx([0.45, 8.0, 0.35, 6.0, 0.4], rel=1e-4)
    fit = fit_scaling(made, draws=2)
    for flops in (1e12, 1e16):
        # The minimum of A / N^a + B / D^b with FLOPS * N * D = flops, equation 4 of arXiv 2203.15556.
        ratio = (TRUE.a * TRUE.A / (TRUE.b * TRUE.B)) ** (1 / (TRUE.a + TRUE.b))
        expected = ratio * (flops / FLOPS) ** (TRUE.b / (TRUE.a + TRUE.b))
        assert fit.optimal_size(flops) == pytest.approx(expected, rel=1e-3)
    assert fit.optima([1e12, 1e15]).extrapolated.tolist() == [True, False]


def test_forecasts_of_noisy_runs_have_intervals_with_the_truth_and_beat_no_change():
    run = {"parameters": 7e5, "tables": 1e5, "flops": 1e5 * FLOPS * 7e5}
    for seed in range(2):
        made = points(noise=0.003, seed=seed)
        (row,) = fit_scaling(made, draws=8).forecast({"long": run}).itertuples()
        truth = TRUE.loss(7e5, 1e5)
        assert row.no_change == made.loss[(made.parameters == 7e5)].min()
        assert abs(row.loss - truth) < 0.5 * abs(row.no_change - truth)
        assert row.low < row.loss < row.high
        assert row.low < truth < row.high


def test_losses_without_a_floor_are_fitted_too():
    made = points()
    law = fit_law(made.parameters, made.tables, made.loss - TRUE.E)
    assert law.E < 0.01
    assert [law.a, law.b] == pytest.approx([TRUE.a, TRUE.b], rel=0.05)


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    monkeypatch.setattr("tabicl_train.sweep.ladder.DRAWS", 2)

    def plan(text: str, *overrides: str):
        (tmp_path / "sweep").mkdir(exist_ok=True)
        (tmp_path / "sweep/own.yaml").write_text(text)
        return make_plan(["sweep=own", f"run_dir={tmp_path}/it", *overrides], str(tmp_path))

    return plan


def test_a_ladder_ends_with_its_law_and_forecast(plan_of):
    plan = plan_of(LADDER)
    assert plan.sweep.metric == "synthetic/loss" and plan.other_tables == []
    steps = sum(stage.steps for stage in compose(["experiment=smoke"]).curriculum.stages.values())
    (tables,) = [stage.tables for stage in compose(["experiment=smoke"]).curriculum.stages.values()]
    assert plan.forecast["long"].tables == 4 * steps * tables
    sizes = {tuple(point.values()): size for point, size in zip(plan.points, plan.sizes, strict=True)}
    assert sizes["b", 0.5].parameters == count_parameters(compose(["experiment=smoke", "model.embed_dim=32"]).model)

    def quality(point: dict, seed: int) -> float:
        size = sizes[tuple(point.values())]
        return float(TRUE.loss(size.parameters, size.tables))

    assert invent(plan, quality, count=plan.total - 1).ladder is None, "a point is missing"
    sweep = invent(plan, quality, count=1)
    last = sweep.text().splitlines()[-1].split()
    long = plan.forecast["long"]
    assert last[:3] == ["long", f"{long.parameters:,}", f"{long.tables:,}"]
    assert float(last[4]) == pytest.approx(TRUE.loss(long.parameters, long.tables), abs=2e-3)
    assert float(last[-1]) == pytest.approx(TRUE.loss(*sizes["a", 1][:2]), abs=1e-4)

    sweep.write_csv()
    rows = csv.DictReader((plan.folder / "results.csv").read_text().splitlines())
    found = {(int(row["parameters"]), int(row["tables"])) for row in rows}
    assert found == {(size.parameters, size.tables) for size in plan.sizes}


@pytest.mark.slow  # the figures of Optuna
def test_the_page_of_a_ladder_has_its_figure_and_forecast(plan_of):
    sweep = invent(plan_of(LADDER), some_loss)
    write_page(sweep)
    page = Page(sweep.folder / "sweep.html")
    assert page.table("run", "longest run of this size").keys() == {"long"}
    assert len(page.pictures) == 6  # two of them slices
    assert (sweep.folder / "figures/scaling_law.png").exists()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[0.25, 0.5, 1]", "[0.5, 1]", "a scaling law needs at least 6 points, 3 sizes and 3 numbers of tables; there"),
        (WIDTHS, "prior: [mlp_scm, tree_scm]", "the points differ in prior, so that their losses are not comparable"),
        ("long: [", "long: [prior=tree_scm, ", "sweep.forecast.long differs from the points in prior; losses are not"),
        ("long: [", "long: [validation.tables=8, ", "sweep.forecast.long differs from the points in validation.tables"),
        (
            "long: [",
            "long: ['curriculum.stages.smoke.rows=[40,200]', ",
            "sweep.forecast.long differs from the points in the trained range; losses are not comparable",
        ),
        (
            "long: [experiment=smoke, validation.every=5, ",
            "long: [experiment=smoke, ",
            "sweep.forecast.long: sweep.metric is 'synthetic/loss', but validation.every is 0",
        ),
        (
            "scaling_law: true",
            "scaling_law: true\nmetric: loss",
            "sweep.metric is 'loss'; it needs a loss of validation",
        ),
        ("scaling_law: true", "scaling_law: false", "forecast names runs, but scaling_law is false"),
    ],
)
def test_what_has_no_law_is_refused_before_the_runs(plan_of, old, new, problem):
    assert old in LADDER
    with pytest.raises(ConfigError) as caught:
        plan_of(LADDER.replace(old, new))
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_a_forecast_says_that_its_tables_have_other_sizes(plan_of):
    text = LADDER.replace("long: [", "long: ['curriculum.stages.smoke.rows=[40,160]', ")
    sweep = invent(plan_of(text), some_loss)
    assert sweep.text().endswith(
        "long: tables of other sizes than those of the runs, which the law does not take into account"
    )


def test_scaled_steps_and_rates_are_those_of_the_run_and_are_scaled_once():
    plain = compose(["experiment=mini"])
    scaled = compose(["experiment=mini", "curriculum.scale_steps=0.1", "curriculum.scale_rates=2"])
    for name, stage in scaled.curriculum.stages.items():
        whole = plain.curriculum.stages[name]
        assert stage.steps == whole.steps // 10
        assert stage.learning_rate == 2 * whole.learning_rate
        assert stage.final_learning_rate == 2 * whole.final_learning_rate
    assert from_values(dataclasses.asdict(scaled)) == scaled
    assert compose(["experiment=smoke", "curriculum.scale_steps=1e-9"]).total_steps == 1
    with pytest.raises(ConfigError, match="scale_steps is -1"):
        compose(["experiment=smoke", "curriculum.scale_steps=-1"])


def test_the_size_of_a_run_counts_the_steps_that_it_takes():
    half = size_of(compose(["experiment=smoke", "trainer.max_steps=10"]))
    whole = size_of(compose(["experiment=smoke"]))
    assert (half.tables, whole.tables) == (80, 160)
    assert half.flops == pytest.approx(whole.flops / 2)
