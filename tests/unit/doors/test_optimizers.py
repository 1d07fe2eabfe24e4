"""Optimizers of plug-ins: those that decide on the device whether a step counts, and plain ones of torch."""

import dataclasses

import pytest
import torch
from torch import nn
from training_runs import SHORT_RUN, Poison, last_checkpoint, train_short_run

from tabicl_train import register
from tabicl_train.config.compose import compose, from_values
from tabicl_train.errors import ConfigError
from tabicl_train.model.family import Network
from tabicl_train.training.optimizer import Muon, build_optimizer, optimizer_remarks, state_bytes
from tabicl_train.training.state import untrained_module

SHORT = ["curriculum.stages.smoke.steps=5", "checkpoint.every=3"]


@dataclasses.dataclass
class SignOptions:
    beta: float = 0.9

    def problems(self):
        return [] if 0 <= self.beta < 1 else [f"beta is {self.beta}; it must lie in [0, 1)"]


class Sign(torch.optim.Optimizer):
    """Signs of a moving average; whether a step counts is decided on the device."""

    def __init__(self, groups, beta):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.beta = beta

    @torch.no_grad()
    def step(self, taken):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, taken.float() * (1 - self.beta))
                p.mul_(1 - taken * group["lr"] * group["weight_decay"]).sub_(taken * group["lr"] * mean.sign())


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    ours = {name: register.optimizer._entries[name] for name in register.optimizer if name in ("muon", "adamw")}
    monkeypatch.setattr(register.optimizer, "_entries", ours)
    register.optimizer("torch_adamw", torch.optim.AdamW)
    register.optimizer("sgd", torch.optim.SGD)
    register.optimizer("adagrad", torch.optim.Adagrad)
    register.optimizer("lbfgs", torch.optim.LBFGS)
    register.optimizer("sign", Sign, options=SignOptions)


def states(run_dir):
    content = last_checkpoint(run_dir)
    (optimizer,) = content["optimizer_states"]
    values = [value for state in optimizer["state"].values() for value in state.values()]
    return list(content["state_dict"].values()), values


def test_an_optimizer_of_torch_skips_a_step_without_a_trace_and_resumes_to_the_bit(tmp_path):
    """The schedule, the decay of matrices alone and the clipping are those of our AdamW."""
    settings = [*SHORT, "optimizer=torch_adamw", "optimizer.betas=[0.9,0.95]"]
    poison = Poison({1})
    train_short_run(tmp_path / "whole", *settings, callbacks=(poison,))
    first, second, third, *_ = poison.states
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    for steps in (3, 5):
        train_short_run(tmp_path / "parts", *settings, f"trainer.max_steps={steps}", callbacks=(Poison({1}),))
    for whole, parts in zip(states(tmp_path / "whole"), states(tmp_path / "parts"), strict=True):
        assert len(whole) > 10
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    train_short_run(tmp_path / "ours", *SHORT, "optimizer=adamw", callbacks=(Poison({1}),))
    for a, b in zip(states(tmp_path / "ours")[0], states(tmp_path / "whole")[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optimizer=sgd", "optimizer.momentm=0.9"], "optimizer.momentm: no such setting; did you mean optimizer.mom"),
        (["optimizer=sgd", "optimizer.momentum=much"], "optimizer.momentum is 'much'; it must be of type float"),
        (["optimizer=sgd", "optimizer.nesterov=true"], "cannot take a step: Nesterov momentum requires a momentum"),
        (["optimizer=lbfgs"], "optimizer.name is 'lbfgs', which cannot take a step: "),
        (["optimizer.name=sign", "optimizer.beta=2"], "optimizer.beta is 2.0; it must lie in [0, 1)"),
        (["optimizer=sgd", "optimizer.weight_decay=1"], "optimizer.weight_decay: no such setting"),  # of the stage
    ],
)
def test_options_are_checked(settings, words):
    with pytest.raises(ConfigError) as caught:
        compose([*SHORT_RUN, *settings])
    (problem,) = caught.value.problems
    assert words in problem


def test_settings_from_a_checkpoint_name_the_file_that_registers_a_class_of_torch():
    config = compose([*SHORT_RUN, "optimizer=sgd", "optimizer.momentum=0.5"])
    (record,) = config.plugins_used()
    assert record["uses"] == [["optimizer", "sgd"]]
    assert record["files"] == ["test_optimizers.py"]
    assert from_values(dataclasses.asdict(config)).optimizer == config.optimizer
    assert [state_bytes(config.optimizer), state_bytes(compose(SHORT_RUN).optimizer)] == [4, 8]
    optimizer = build_optimizer(untrained_module(config).model, config.optimizer)
    assert [group["decayed"] for group in optimizer.param_groups] == [True, False]
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_stage_begins_with_the_state_of_a_new_optimizer():
    module = untrained_module(compose([*SHORT_RUN, "optimizer=adagrad", "optimizer.initial_accumulator_value=0.5"]))
    optimizer = module.configure_optimizers()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["sum"] += 1
    module.empty_state(optimizer)
    assert all((state["sum"] == 0.5).all() for state in optimizer.state.values())


class Foreign(Network):
    """A network that does not say which of its matrices are hidden."""

    def __init__(self):
        nn.Module.__init__(self)
        self.config = type("Config", (), {"outputs": 5})
        self.cell = nn.Linear(1, 8)
        self.position = nn.Embedding(7, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, pack, checkpoint_rows=None):
        raise NotImplementedError


class Flat(Foreign):
    def is_hidden_matrix(self, name, parameter):
        return False


class Declared(Foreign):
    def is_hidden_matrix(self, name, parameter):
        return name == "head.weight"


@pytest.mark.parametrize(
    ("network", "taken", "words"),
    [
        (
            Foreign,
            ["hidden.weight"],
            "optimizer muon takes 64 weights of matrices, AdamW the other 125; the network does",
        ),
        (Declared, ["head.weight"], None),
        (Flat, [], "warning   optimizer=muon finds no hidden matrix in this network, so AdamW takes all 189 weights"),
    ],
)
def test_muon_takes_hidden_matrices_of_a_foreign_network_and_says_so(network, taken, words):
    network = network()
    optimizer = build_optimizer(network, compose(SHORT_RUN).optimizer)
    assert isinstance(optimizer, Muon)
    names = {parameter: name for name, parameter in network.named_parameters()}
    of_muon = [group["params"] for group in optimizer.param_groups if group["kind"] == "muon"]
    assert [names[parameter] for parameters in of_muon for parameter in parameters] == taken
    lines = optimizer_remarks(network, optimizer, "muon", has_decay=True)
    assert [line[: len(words or "")] for line in lines] == ([] if words is None else [words])


def test_a_run_says_what_an_optimizer_does_not_take_from_its_stages():
    lines = optimizer_remarks(Foreign(), torch.optim.Rprop(Foreign().parameters()), "rprop", has_decay=True)
    assert lines == [
        "optimizer rprop has no step(taken), so each step waits for the device",
        "warning   the optimizer rprop has no weight_decay: the weight decay of the stages has no effect",
    ]
    assert optimizer_remarks(Foreign(), Sign(Foreign().parameters(), 0.9), "sign", has_decay=True) == []
