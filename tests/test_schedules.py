import math

import pytest

from tabicl_train.config.schema import SCHEDULES, StageConfig
from tabicl_train.schedules import learning_rate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_warms_up_then_follows_its_schedule(schedule):
    stage = StageConfig(steps=1001, warmup=100 / 1001, learning_rate=1.0, final_learning_rate=0.1, schedule=schedule)
    rates = [learning_rate(stage, step) for step in range(stage.steps)]
    assert rates[0] == pytest.approx(1 / 101) and rates[49] == pytest.approx(50 / 101)
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
