"""What Lightning does with the processes of a run, and what it is kept from doing."""

import signal
from unittest import mock

import lightning as L
import pytest
import torch.distributed as dist

from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.processes.join import one_process
from tabicl_train.processes.trainer_plugins import disable_sigterm_handling
from tabicl_train.train import run_steps

STEPS = 3


class SigtermHandlers(L.Callback):
    """The handler of SIGTERM in each step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, *_) -> None:
        self.seen.append(signal.getsignal(signal.SIGTERM))


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("disable", [disable_sigterm_handling, lambda trainer: None], ids=["disabled", "Lightning's"])
def test_lightning_leaves_sigterm_alone(disable, group, monkeypatch):
    """Lightning's own behavior is tested too: where it has changed, what disables it may have become useless."""
    config = compose(["experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu"])
    handler = signal.getsignal(signal.SIGTERM)
    watch = SigtermHandlers()
    monkeypatch.setattr(training, "disable_sigterm_handling", disable)
    with (
        mock.patch.object(dist, "broadcast") as broadcast,
        mock.patch.object(L.Trainer, "world_size", 2),  # it broadcasts between several processes only
    ):
        run_steps(config, None, STEPS, watch, one_process())
    assert len(watch.seen) == STEPS
    if disable is disable_sigterm_handling:
        assert broadcast.call_count == 0 and set(watch.seen) == {handler}
    else:
        assert broadcast.call_count == STEPS and handler not in watch.seen
    assert signal.getsignal(signal.SIGTERM) == handler
