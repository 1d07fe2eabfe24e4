"""A run that is stopped and resumed, with its average, against a training loop of a few lines on torch's AdamW."""

import math
from pathlib import Path

import pytest
import torch
from training_runs import SHORT_RUN, read_metrics, train_short_run

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.model.config import family_of
from tabicl_train.run.checkpoint import averaged_weights
from tabicl_train.stream.steps import StepStream
from tabicl_train.training.module import query_losses

DECAYS = {"smoke": 0.5, "later": 3.0}  # stages of four and three steps
SETTINGS = [
    "optimizer=adamw", "optimizer.eps=1e-3", "optimizer.betas=[0.8,0.9]", "checkpoint.every=1", "checkpoint.keep=9",
    *(f"curriculum.stages.smoke.{value}" for value in (
        "steps=4", "schedule=linear", "warmup=0.5", "learning_rate=0.01", "final_learning_rate=0.002", "clip=0.5",
        "weight_decay=0.5", "tables=4")),
    *(f"+curriculum.stages.later.{value}" for value in (
        "steps=3", "rows=[30,50]", "features=[2,4]", "tables=4", "group_size=1", "schedule=cosine", "warmup=0",
        "learning_rate=0.004", "final_learning_rate=0.001", "weight_decay=3", "fresh_optimizer=false")),
]  # fmt: skip
RATES = [0.01 / 3, 0.02 / 3, 0.01, 0.002, *(0.001 + 0.003 * (1 + math.cos(math.pi * x)) / 2 for x in (0, 0.5, 1))]


class Initial:
    """Keeps the weights before the first step."""

    def start(self, state) -> None:
        self.weights = {name: w.clone() for name, w in state.network.state_dict().items()}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Three steps without an EMA, then one with it, then the others."""
    run_dir, initial = tmp_path_factory.mktemp("trajectory") / "run", Initial()
    train_short_run(run_dir, *SETTINGS, "averages.ema=0", "trainer.max_steps=3", callbacks=(initial,))
    train_short_run(run_dir, *SETTINGS, "trainer.max_steps=4")
    train_short_run(run_dir, *SETTINGS)
    torch.save(initial.weights, run_dir / "initial")
    return run_dir


def content(run_dir: Path, step: int) -> dict:
    return torch.load(run_dir / f"checkpoints/step-{step:08d}.ckpt", weights_only=True)


def assert_near(weights: dict, expected: dict) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            weights[name], value, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_every_checkpoint_has_the_weights_of_a_plain_training_loop(run_dir):
    config = compose([*SHORT_RUN, *SETTINGS])
    network = family_of(config.model)(config.model)
    network.load_state_dict(torch.load(run_dir / "initial"))
    trained = [p for p in network.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2]}, {"params": [p for p in trained if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
    stream = StepStream(configured_prior(config.prior), config.curriculum, config.model, 0, range(7))
    ema, norms = {}, []
    for item, rate, row in zip(stream, RATES, read_metrics(run_dir), strict=True):
        for group, decay in zip(optimizer.param_groups, (DECAYS[item.stage], 0.0), strict=True):
            group |= {"lr": rate, "weight_decay": decay}
        loss = sum(query_losses(network, pack).sum() for pack in item.packs) / 4
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, config.curriculum.stages[item.stage].clip).item())
        optimizer.step()
        weights = {name: w.clone() for name, w in network.state_dict().items()}
        if item.step >= 3:
            decay = min(0.9, (item.step - 1) / (item.step + 8))
            ema = {name: decay * (ema or weights)[name] + (1 - decay) * w for name, w in weights.items()}
        assert [float(row[key]) for key in ("loss", "grad_norm", "lr")] == pytest.approx(
            [loss.item(), norms[-1], rate], rel=1e-4
        )

        saved = content(run_dir, item.step + 1)
        assert_near({name.removeprefix("model."): w for name, w in saved["state_dict"].items()}, weights)
        assert_near(averaged_weights(saved), ema)
    assert min(norms[:4]) > 0.5  # all clipped
