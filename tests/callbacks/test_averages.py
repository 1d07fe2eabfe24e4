"""Averages of the weights against their formulas."""

from types import SimpleNamespace

import pytest
import torch

from tabicl_train.callbacks.averages import Averages
from tabicl_train.config.monitoring import AveragesConfig


def train(averages: Averages, steps: range) -> None:
    """Steps (counted with each one) of a network whose weight after step t is t."""
    network = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    module = SimpleNamespace(model=network, device=torch.device("cpu"))
    for step in steps:
        with torch.no_grad():
            network.weight.fill_(step)
        averages.on_train_batch_end(step=step, module=module)


@pytest.mark.parametrize("resumed", [None, 104, 107])
def test_an_ema_that_starts_late_resumes_its_start(resumed):
    """Switched on at step 101, of which the weight after it is the start: its decay counts from there."""
    averages = Averages(AveragesConfig(ema=0.9))
    if resumed is not None:
        train(averages, range(101, resumed))
        state, averages = averages.state_dict(), Averages(AveragesConfig(ema=0.9))
        averages.load_state_dict(state)
    train(averages, range(resumed or 101, 111))
    expected = 101.0
    for steps, weight in enumerate(range(101, 111), 1):
        decay = min(0.9, (1 + steps) / (10 + steps))
        expected = decay * expected + (1 - decay) * weight
    assert averages.ema["weight"].item() == pytest.approx(expected, rel=1e-12)
