"""The average of the weights against its formula."""

from types import SimpleNamespace

import pytest
import torch

from tabicl_train.config.schema import AveragesConfig
from tabicl_train.training.callbacks.averages import Averages


def averaging(config: AveragesConfig) -> Averages:
    averages = Averages()
    averages.context = SimpleNamespace(config=SimpleNamespace(averages=config))
    return averages


def train(averages: Averages, steps: range) -> Averages:
    """Steps (counted with each one) of a network whose weight after step t is t, as are its buffers."""
    network = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    for name, dtype in (("steps", torch.int64), ("odd", torch.bool), ("phase", torch.complex64)):
        network.register_buffer(name, torch.zeros(2, dtype=dtype))
    module = SimpleNamespace(model=network, device=torch.device("cpu"))
    for step in steps:
        with torch.no_grad():
            network.weight.fill_(step)
            network.steps.fill_(step)
            network.odd.fill_(step % 2)
            network.phase.fill_(step * 1j)
        averages.after_step(SimpleNamespace(step=step, module=module), None)
    return averages


def resumed(averages: Averages, config: AveragesConfig) -> Averages:
    other = averaging(config)
    other.load_state_dict(averages.state_dict())
    return other


@pytest.mark.parametrize("stopped", [None, 104, 107])
def test_an_ema_that_starts_late_resumes_its_start(stopped):
    """Switched on at step 101, of which the weight after it is the start: its decay counts from there."""
    averages = averaging(AveragesConfig(ema=0.9))
    if stopped is not None:
        averages = resumed(train(averages, range(101, stopped)), AveragesConfig(ema=0.9))
    train(averages, range(stopped or 101, 111))
    expected = 101.0
    for steps, weight in enumerate(range(101, 111), 1):
        decay = min(0.9, (1 + steps) / (10 + steps))
        expected = decay * expected + (1 - decay) * weight
    assert averages.ema["weight"].item() == pytest.approx(expected, rel=1e-12)
    assert [averages.ema[name].tolist() for name in ("steps", "odd", "phase")] == [[110] * 2, [False] * 2, [110j] * 2]


def test_an_average_that_a_checkpoint_lacks_starts_anew():
    averages = train(averaging(AveragesConfig(ema=0.9)), range(1, 5))
    averages.load_state_dict({})  # the guard goes back to a checkpoint from before it was switched on
    assert averages.state_dict() == {"ema": {}, "since": 0}
    train(averages, range(7, 9))
    assert averages.ema["weight"].item() == pytest.approx(3 / 12 * 7 + 9 / 12 * 8)
