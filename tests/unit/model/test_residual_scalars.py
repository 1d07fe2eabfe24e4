"""Learned factors of the residual branches: what they compute, who trains them, and exports without them."""

import dataclasses

import pytest
import torch
from networks import SMALL, draw_batch, forward_batch, package_network, small_network
from training_runs import assert_same_end, last_checkpoint, train_by_command, write_untrained_run

from tabicl_train.config.schema import OptimizerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.public_config import to_public
from tabicl_train.optimizer import build_optimizer
from tabicl_train.prediction.export import export
from tabicl_train.weights.reader import load_model

SCALE = "residual_scale"


def scales(network: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in network.named_parameters() if name.endswith(SCALE)}


def test_a_network_begins_as_the_one_without_factors():
    networks = []
    for has_scalars in (False, True):
        torch.manual_seed(0)
        networks.append(TabICL(TabICLConfig(**SMALL, residual_scalars=has_scalars)))
    plain, scaled = networks
    X, y_train, _ = draw_batch(2, 20, 5, 12)
    assert torch.equal(forward_batch(plain, X, y_train), forward_batch(scaled, X, y_train))
    assert not scales(plain) and len(scales(scaled)) == 2 * (2 * 2 + 2 + 2)  # two of a block, two blocks in a column's
    assert scaled.state_dict().keys() - plain.state_dict().keys() == scales(scaled).keys()


@pytest.mark.parametrize("optimizer", ["muon", "muon_all", "adamw"])
def test_adamw_trains_the_factors_without_decay(optimizer):
    network = small_network(residual_scalars=True)
    for group in build_optimizer(network, OptimizerConfig(name=optimizer)).param_groups:
        if any(p.ndim == 0 for p in group["params"]):
            assert (group["kind"], group["decayed"]) == ("adamw", False)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_export_is_a_network_of_the_tabicl_package(task, tmp_path):
    write_untrained_run(tmp_path / "run", "model.residual_scalars=true", f"task={task}")
    network = load_model(tmp_path / "run")
    assert network.config.residual_scalars and len(scales(network)) > 0
    with pytest.raises(ConfigError, match=r"the public format has no model\.residual_scalars=true"):
        to_public(network.config)
    X, y_train, _ = draw_batch(2, 24, 5, 15, classes=network.config.max_classes)
    for output in ("model.ckpt", "hub"):
        export(str(tmp_path / "run"), str(tmp_path / output))
        plain = load_model(tmp_path / output)
        assert plain.config == dataclasses.replace(network.config, residual_scalars=False)
        with torch.no_grad():
            expected = forward_batch(network, X, y_train)
            assert (package_network(plain)(X, y_train) - expected).abs().max() < 1e-5
            assert (forward_batch(plain, X, y_train) - expected).abs().max() < 1e-5


def test_a_continued_run_keeps_its_factors(tmp_path):
    settings = ("model.residual_scalars=true", "trainer.max_steps=4", "stream.num_workers=0", "validation.every=0")
    train_by_command(tmp_path / "whole", *settings)
    train_by_command(tmp_path / "parts", *settings, "trainer.max_steps=2")
    train_by_command(tmp_path / "parts", *settings)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    learned = [
        weight for name, weight in last_checkpoint(tmp_path / "parts")["state_dict"].items() if name.endswith(SCALE)
    ]
    assert learned and all(weight != 1 for weight in learned)


def test_a_decay_of_the_stream_is_another_factor():
    """x -> a x + b f(norm(x)) with decays a, and y -> y + b / (product of a) f(norm(y)), differ by the scale of x."""
    generator = torch.Generator().manual_seed(0)
    depth, width = 6, 8
    a = torch.rand(depth, generator=generator) + 0.5
    b = torch.randn(depth, generator=generator)
    matrices = torch.randn(depth, width, width, generator=generator)
    x = y = torch.randn(5, width, generator=generator)
    norm = torch.nn.LayerNorm(width, eps=0.0)
    for number in range(depth):
        x = a[number] * x + b[number] * (norm(x) @ matrices[number]).tanh()
        y = y + b[number] / a[: number + 1].prod() * (norm(y) @ matrices[number]).tanh()
    torch.testing.assert_close(x, a.prod() * y)
    torch.testing.assert_close(norm(x), norm(y))
