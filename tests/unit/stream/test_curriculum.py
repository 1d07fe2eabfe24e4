import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.doors import register
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.stream.curriculum import plan_step, stage_at
from tabicl_train.stream.schedules import learning_rate, schedule_problems

SCHEDULES = ("cosine", "linear", "wsd", "constant")
LONG = StageConfig(steps=40, rows=[400, 60_000], train_share=[0.79, 0.81], tables=64, group_size=1)
SHORT = StageConfig(steps=60, rows=[1024, 1024], tables=64, group_size=4)
MODEL = TabICLConfig()
TWO = CurriculumConfig({"short": SHORT, "long": LONG})

stages = st.builds(
    lambda low, extra, tables, group, budget, features: StageConfig(
        steps=5,
        rows=[low, low + extra],
        features=[1, features],
        tables=tables,
        group_size=group,
        pack_tokens=budget,
    ),
    st.integers(10, 500),
    st.integers(0, 5000),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 200_000),
    st.integers(1, 100),
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(stages, st.integers(0, 2**40), st.integers(0, 4), st.integers(1, 8))
def test_ranks_share_a_step_without_loss_or_overlap(stage, seed, step, ranks):
    ranks = min(ranks, stage.tables)
    plan = plan_step(CurriculumConfig({"s": stage}), MODEL, seed, step)
    for group in plan.groups:
        group.spec.check()
        assert len({table // stage.group_size for table in group.tables}) == 1
        low, high = stage.rows
        assert low <= group.spec.num_rows <= high
        assert group.table_tokens == TabICL.pack_tokens(MODEL, group.spec.num_rows, group.spec.num_features)

    tables = []
    specs = {}
    for rank in range(ranks):
        share = list(itertools.chain.from_iterable(plan.packs(rank, ranks)))
        assert share
        for group in share:
            tables += group.tables
            specs |= dict.fromkeys(group.tables, group.spec)
    assert sorted(tables) == list(range(stage.tables))
    # The address of a table, its group's included, does not depend on how the step is cut.
    for group in plan.groups:
        assert all(specs[table] == group.spec for table in group.tables)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(stages, st.integers(0, 2**40), st.integers(0, 4), st.integers(1, 8))
def test_packs_are_within_the_budget_as_few_as_it_allows_and_even(stage, seed, step, ranks):
    plan = plan_step(CurriculumConfig({"s": stage}), MODEL, seed, step)
    ranks = min(ranks, stage.tables)
    for rank in range(ranks):
        packs = plan.packs(rank, ranks)
        tokens = []  # of each table, by pack
        shapes = []
        for pack in packs:
            tokens.append([group.table_tokens for group in pack for _ in group.tables])
            shapes += [(group.spec.num_rows, group.spec.train_size, group.spec.num_features) for group in pack]
        assert shapes == sorted(shapes)
        for sizes in tokens:
            assert sum(sizes) <= stage.pack_tokens or len(sizes) == 1

        all_sizes = [size for sizes in tokens for size in sizes]
        assert len(packs) == fewest(all_sizes, stage.pack_tokens)
        # If each pack exceeded the mean by more than a table, fewer packs would do; budgets are tried in steps of 2 %.
        assert max(map(sum, tokens)) <= 1.02 * (sum(all_sizes) / len(packs) + max(all_sizes))


def fewest(sizes: list[int], budget: float) -> int:
    """Pieces of a sequence that are within a budget, or a single number: the fewest, by trying all first pieces."""
    best = [0]
    for end in range(1, len(sizes) + 1):
        best.append(1 + min(best[start] for start in range(end) if end - start == 1 or sum(sizes[start:end]) <= budget))
    return best[-1]


def test_a_step_is_a_function_of_seed_and_step():
    def shapes(seed: int, step: int) -> list[tuple[int, ...]]:
        specs = [group.spec for group in plan_step(TWO, MODEL, seed, step).groups]
        return [(spec.num_rows, spec.train_size, spec.num_features) for spec in specs]

    assert plan_step(TWO, MODEL, 3, 70) == plan_step(TWO, MODEL, 3, 70)
    assert shapes(3, 70) != shapes(4, 70) and shapes(3, 70) != shapes(3, 71)


def test_rows_are_log_uniform_and_features_capped():
    specs = []
    for step in range(60, 100):
        specs += [group.spec for group in plan_step(TWO, MODEL, 1, step).groups]

    # 2,560 draws: the standard error of the mean is 0.029, of the quartiles about 0.05
    logs = np.log([spec.num_rows for spec in specs])
    low, high = math.log(400), math.log(60_001)
    assert abs(logs.mean() - (low + high) / 2) < 0.1
    assert np.allclose(np.quantile(logs, [0.25, 0.75]), [low + (high - low) / 4, low + 3 * (high - low) / 4], atol=0.15)

    for rows, most in ((10_241, 80), (20_001, 60), (30_001, 40), (40_001, 30), (50_001, 20)):
        assert max(spec.num_features for spec in specs if spec.num_rows >= rows) <= most
    assert max(spec.num_features for spec in specs if spec.num_rows <= 10_240) > 80
    labeled = [spec.train_size / spec.num_rows for spec in specs]
    assert min(labeled) > 0.788
    assert max(labeled) < 0.812


def test_uniform_rows_reach_both_ends():
    stage = replace(SHORT, rows=[20, 23], row_distribution="uniform", tables=200, group_size=1)
    rows = [group.spec.num_rows for group in plan_step(CurriculumConfig({"s": stage}), MODEL, 0, 0).groups]
    assert set(rows) == {20, 21, 22, 23}


def test_small_tables_ask_for_fewer_classes():
    stage = replace(SHORT, rows=[10, 12], tables=50, train_share=[0.3, 0.9])
    for group in plan_step(CurriculumConfig({"s": stage}), MODEL, 0, 0).groups:
        assert group.spec.max_classes <= min(group.spec.train_size, group.spec.num_rows - group.spec.train_size)


@pytest.mark.parametrize("sees_them", [False, True])
def test_priors_are_asked_for_missing_values_only_by_networks_that_see_them(sees_them, monkeypatch):
    monkeypatch.setattr(SequenceConfig, "missing_values", sees_them)
    for model in (MODEL, SequenceConfig()):
        groups = plan_step(TWO, model, 1, 0).groups
        assert {group.spec.keeps_missing for group in groups} == {model.missing_values}


def test_stages_follow_each_other():
    assert stage_at(TWO, 0) == ("short", SHORT, 0)
    assert stage_at(TWO, 59) == ("short", SHORT, 59)
    assert stage_at(TWO, 60) == ("long", LONG, 0)
    with pytest.raises(IndexError):
        stage_at(TWO, 100)


def imbalance(stage: StageConfig, ranks: int, steps: int) -> tuple[float, float]:
    """Mean over steps of the slowest rank's cost over the lower bound: as assigned, and with tables dealt in turn."""
    assigned = []
    dealt = []
    for step in range(steps):
        plan = plan_step(CurriculumConfig({"s": stage}), MODEL, 5, step)
        costs = [group.table_cost for group in plan.groups for _ in group.tables]
        bound = max(sum(costs) / ranks, max(costs))
        loads = [sum(group.cost for group in share) for share in plan.assign(ranks)]
        assert sum(loads) == pytest.approx(sum(costs))
        assigned.append(max(loads) / bound)
        in_turn = [sum(costs[rank::ranks]) for rank in range(ranks)]
        dealt.append(max(in_turn) / bound)
    return float(np.mean(assigned)), float(np.mean(dealt))


def test_ranks_are_balanced_by_the_costs_of_the_configuration():
    stage = replace(LONG, steps=200, tables=16, group_size=1)
    plans = [
        plan_step(CurriculumConfig({"s": stage}, rank_costs=costs), MODEL, 5, 0) for costs in ([], [0.0, 2.0, 0.0])
    ]
    by_flops, by_rows = [
        [sum(g.spec.num_rows * len(g.tables) for g in share) for share in plan.assign(4)] for plan in plans
    ]
    assert max(by_rows) < max(by_flops)
    (group, *_) = plan_step(CurriculumConfig({"s": stage}, rank_costs=[3.0, 5.0, 7.0]), MODEL, 5, 0).groups
    spec = group.spec
    assert group.table_cost == spec.num_rows * (3 * spec.num_features + 5 + 7 * spec.train_size)
    assert CurriculumConfig({"s": stage}, rank_costs=[1.0, 2.0]).problems() == [
        "rank_costs is [1.0, 2.0]; it must be [] or three numbers, for cells, rows and pairs"
    ]


@pytest.mark.parametrize("stage", [replace(LONG, steps=200), replace(SHORT, steps=200)])
def test_ranks_finish_together(stage):
    assigned, dealt = imbalance(stage, ranks=8, steps=60)
    assert assigned < 1.05 < dealt


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_warms_up_then_follows_its_schedule(schedule):
    stage = StageConfig(steps=1001, warmup=100 / 1001, learning_rate=1.0, final_learning_rate=0.1, schedule=schedule)
    rates = [learning_rate(stage, step) for step in range(stage.steps)]
    assert rates[0] == pytest.approx(1 / 101)
    assert rates[49] == pytest.approx(50 / 101)
    assert rates[100] == pytest.approx(1.0) and max(rates) == rates[100]
    done = (300 - 100) / 900
    expected = {"cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2, "linear": 1 - 0.9 * done}
    assert rates[300] == pytest.approx(expected.get(schedule, 1.0))
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_wsd_is_stable_and_then_falls_in_a_straight_line():
    stage = StageConfig(steps=1001, warmup=0.1, learning_rate=1.0, final_learning_rate=0.0, schedule="wsd", decay=0.25)
    rates = [learning_rate(stage, step) for step in range(stage.steps)]
    assert set(rates[101:751]) == {1.0}
    assert [rates[750 + n] for n in (50, 125, 250)] == pytest.approx([0.8, 0.5, 0.0])
    short = StageConfig(steps=10, warmup=0.9, learning_rate=1.0, final_learning_rate=0.0, schedule="wsd", decay=1.0)
    assert learning_rate(short, 9) == pytest.approx(1.0)  # nothing is left to fall over


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_one_or_two_steps_have_a_positive_finite_rate(schedule):
    for steps in (1, 2):
        stage = StageConfig(steps=steps, warmup=0.0, schedule=schedule)
        assert all(0 < learning_rate(stage, step) <= stage.learning_rate for step in range(steps))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda stage, step: 1.0, None),
        (lambda stage, step: None, "returns None for step 2 of a stage of 20; it must return a finite number"),
        (lambda stage, step: math.inf, "returns inf for step 2 of a stage of 20; it must return a finite number"),
        (lambda stage, step: 1 / (step - 2), "division by zero"),
        (lambda stage, step: 1 / (19 - step), "division by zero"),
        (lambda step: 1.0, "takes 1 positional argument but 2 were given"),
    ],
)
def test_a_schedule_that_fails_is_refused_at_the_start(schedule, words, monkeypatch):
    monkeypatch.setitem(register.schedule._entries, "mine", schedule)
    curriculum = CurriculumConfig({"smoke": StageConfig(steps=20, warmup=0.1, schedule="mine")})
    problems = schedule_problems(curriculum)
    assert len(problems) == (words is not None)
    assert not problems or re.match(rf"curriculum.stages.smoke.schedule is 'mine'; it fails: .*{words}", problems[0])
