"""What the guard records, when it warns and stops, and where a rewind goes back to."""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_runs import (
    REWIND,
    SHORT_RUN,
    SHORT_RUN_OF_ANY_FAMILY,
    THREE_STAGES,
    Poison,
    Ruin,
    last_checkpoint,
    read_metrics,
    train_short_run,
)

from tabicl_train import register
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import GuardConfig, RunConfig
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.run.checkpoint import FORMAT_VERSION, read_checkpoint
from tabicl_train.run.records import Records
from tabicl_train.stream.steps import StepStream
from tabicl_train.training import module
from tabicl_train.training.callbacks import guard as guard_module
from tabicl_train.training.callbacks.averages import Averages
from tabicl_train.training.callbacks.callback import LoggedSteps
from tabicl_train.training.callbacks.checkpoints import Checkpoints
from tabicl_train.training.callbacks.guard import Diverged, Guard
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.state import untrained_module
from tabicl_train.weights import resolve
from tabicl_train.weights.reader import read_weights


class Look:
    """Weights, optimizer state, loss scale and average of the weights before a step."""

    def __init__(self, before: int) -> None:
        self.before = before

    def before_step(self, state, item) -> None:
        if item.step == self.before:
            self.weights = {k: v.clone() for k, v in state.module.state_dict().items()}
            states = state.optimizer.state_dict()["state"]
            self.optimizer = {i: {k: v.clone() for k, v in state.items()} for i, state in states.items()}
            self.loss_scale = state.module.loss_scale.scale.clone()
            averages = self.context.find(Averages)
            if averages is not None:
                self.ema = {k: v.clone() for k, v in averages.ema.items()}


def incidents(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose([*SHORT_RUN, "curriculum.stages.smoke.steps=1000"])


def watch(config: RunConfig, folder: Path, every: int = 1, **limits) -> Guard:
    """A guard that looks at every so many steps."""
    guard = Guard()
    config = dataclasses.replace(config, guard=GuardConfig(**limits))
    guard.context = SimpleNamespace(
        config=config, stream=StepStream(None, config.curriculum, config.model, config.seed, range(16)),
        logged=LoggedSteps(every, 16), records=Records(folder), ranks=Ranks(),
        find=lambda cls: checkpoints, callbacks=[],
    )  # fmt: skip
    checkpoints = Checkpoints()
    checkpoints.context = SimpleNamespace(config=config, status=None)
    return guard


def feed(guard: Guard, *steps: tuple[float, float], first: int = 0, model=None, scale: float | None = None) -> None:
    """Steps with these losses and gradient norms; scale: of the loss, of fp16."""
    loss_scale = SimpleNamespace(enabled=scale is not None, scale=torch.tensor(scale or 1.0))
    for number, (loss, norm) in enumerate(steps, first):
        values = {"loss": torch.tensor(loss), "grad_norm": torch.tensor(norm)}
        module = SimpleNamespace(**values, loss_scale=loss_scale, model=model or SimpleNamespace(named_scalings=dict))
        state = SimpleNamespace(step=number + 1, module=module, network=module.model, optimizer=None)
        guard.after_step(state, SimpleNamespace(step=number))


FINE, BAD = (1.0, 1.0), (math.nan, math.nan)


def test_steps_that_are_not_finite_change_nothing_and_are_recorded(tmp_path):
    run_dir = tmp_path / "a run"
    poison = Poison({0, 5, 7})
    train_short_run(run_dir, "trainer.log_every=7", "trainer.max_steps=10", callbacks=(poison,))

    unchanged = []
    for step in range(1, 10):
        pairs = zip(poison.states[step], poison.states[step - 1], strict=True)
        if all(torch.equal(value, before) for value, before in pairs):
            unchanged.append(step)
    assert unchanged == [5, 7]
    assert all(torch.isfinite(value).all() for value in poison.states[-1])

    assert {int(row["skipped"]) for row in read_metrics(run_dir) if int(row["step"]) > 8} == {3}
    lines = incidents(run_dir)
    assert [line["step"] for line in lines] == [0, 5, 7]
    assert {(line["seed"], line["stage"]) for line in lines} == {(0, "smoke")}
    assert lines[0]["loss"] == "nan"
    assert lines[0]["reason"] == "the loss is not finite"
    tables = [number for group in lines[1]["groups"] for number in group["tables"]]
    assert sorted(tables) == list(range(4))
    assert shlex.split(lines[1]["replay"]) == ["tabicl-replay", f"run_dir={run_dir}", "step=5"]

    state = last_checkpoint(run_dir)["optimizer_states"][0]["state"].values()
    assert {int(moments["taken"]) for moments in state if "taken" in moments} == {7}
    saved = read_checkpoint(run_dir / "checkpoints/step-00000008.ckpt")  # all that was known by then, logged or not
    assert saved["callbacks"]["Guard"]["in_a_row"] == 1


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_loss_or_gradient_alone_is_enough(what, tmp_path, monkeypatch):
    query_losses, calls = module.query_losses, []

    def poisoned(*arguments):
        calls.append(None)
        loss = query_losses(*arguments)
        if len(calls) > 1:
            return loss
        if what == "loss":
            return loss + math.nan  # its gradients are those of the loss
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(module, "query_losses", poisoned)
    poison = Poison(set())
    train_short_run(tmp_path / "run", "trainer.max_steps=2", callbacks=(poison,))
    (incident,) = incidents(tmp_path / "run")
    assert incident["step"] == 0
    assert incident["reason"] == f"the {what} is not finite"
    first, second = poison.states
    weights = len(last_checkpoint(tmp_path / "run")["callbacks"]["Averages"]["ema"])
    assert not any(v.any() for v in first[weights:])  # momenta and counts of steps
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_too_many_skipped_steps_in_a_row_stop_the_run_once(config, tmp_path):
    guard = watch(config, tmp_path, skipped_in_a_row=3)
    with pytest.raises(Diverged, match=r"not finite in 3 steps in a row.* begin a new run \(run_dir=\.\.\.\);"):
        feed(guard, FINE, FINE, BAD, FINE, BAD, BAD, BAD)
    faults = (FINE, BAD, BAD, BAD, FINE)  # between two looks
    guard = watch(config, tmp_path, every=10, skipped_in_a_row=3)
    feed(guard, *faults)
    state = guard.state_dict()
    with pytest.raises(Diverged, match="not finite in 3 steps"):
        feed(guard, *[FINE] * 5, first=5)
    resumed = watch(config, tmp_path, every=10, skipped_in_a_row=3)
    resumed.load_state_dict(state)
    feed(resumed, *[FINE] * 5, first=5)


def test_a_search_for_the_loss_scale_is_no_fault_until_it_fails(config, tmp_path):
    guard = watch(config, tmp_path)
    feed(guard, (1.0, math.inf), (1.0, math.inf), FINE, scale=2.0**10)
    assert guard.average == 1.0 and not (tmp_path / "incidents.jsonl").exists()
    feed(guard, (1.0, math.inf), scale=0.5)
    assert incidents(tmp_path)[0]["reason"] == "the gradient norm is not finite"


def test_a_loss_above_the_limit_warns_once_or_stops(config, tmp_path, capsys):
    guard = watch(config, tmp_path, after=3, loss=0.5)
    feed(guard, *[FINE] * 5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "guard     step 3: the moving average of the loss is 1.000, above guard.loss=0.5; warn"
    feed(guard, *[(-60.0, 1.0), (150.0, 1.0)], first=5)  # below the limit, and above it again
    assert [line["action"] for line in incidents(tmp_path)] == ["warn", "warn"]
    with pytest.raises(Diverged, match="step 3: the moving average of the loss"):
        feed(watch(config, tmp_path, after=3, loss=0.5, action="stop"), *[FINE] * 5)
    guard = watch(config, tmp_path, after=3, loss=0.5, action="rewind")
    with pytest.raises(Diverged, match=r"no earlier checkpoint.*weight_decay, or bound the [^,]*\)$"):
        feed(guard, *[FINE] * 5)
    guard.abandoned = [(1, 2), (1, 3), (1, 4)]
    with pytest.raises(Diverged, match="after 3 rewinds"):
        feed(guard, FINE, first=6)


def test_a_runaway_multiplier_counts_only_while_the_loss_is_high(config, tmp_path):
    model = untrained_module(config).model
    limits = {"after": 0, "loss": 100.0, "multiplier": 0.001, "action": "stop"}
    feed(watch(config, tmp_path, **limits, multiplier_loss=50.0), FINE, model=model)
    averaging = untrained_module(compose([*SHORT_RUN, "model.icl_scaling=ssa"])).model  # its b is no such multiplier
    feed(watch(config, tmp_path, **limits), FINE, model=averaging)
    with pytest.raises(Diverged, match=r"the multiplier of icl\.0 at 512 labeled rows is .* above guard\.multiplier="):
        feed(watch(config, tmp_path, **limits), FINE, model=model)


def test_a_runaway_multiplier_of_a_column_block_is_noticed_and_named(config, tmp_path):
    model = untrained_module(config).model
    limits = {"after": 0, "loss": 100.0, "action": "stop"}
    feed(watch(config, tmp_path, **limits), FINE, model=model)
    with torch.no_grad():
        dict(model.named_scalings())["column.0"].base_mlp[-1].bias.fill_(-25.0)
    with pytest.raises(Diverged, match=r"the multiplier of column\.0 at 512 .* above guard\.other_multiplier=20\.0"):
        feed(watch(config, tmp_path, **limits), FINE, model=model)
    feed(watch(config, tmp_path, **limits, other_multiplier=math.inf), FINE, model=model)


def test_shipped_and_initial_weights_have_no_runaway_multiplier(config, tmp_path):
    guard = watch(config, tmp_path)
    for regression in (False, True):
        mini = read_weights(resolve("mini", regression))
        model = TabICL(mini.config)
        model.load_state_dict(mini.tensors)
        assert guard.passed_limit(model, 0.8) is None
    for rule in register.scaling:
        settings = TabICLConfig(col_scaling=rule, icl_scaling=rule, embed_dim=32)
        assert guard.passed_limit(TabICL(settings), 0.8) is None


def pretend_to_have_saved(config: RunConfig, folder: Path, states: dict[int, dict | None], model) -> None:
    (folder / "checkpoints").mkdir()
    weights = {f"model.{name}": w for name, w in model.state_dict().items()}
    for step, state in states.items():
        path = folder / f"checkpoints/step-{step:08d}.ckpt"
        if state is None:
            path.write_bytes(b"damaged")
            continue
        content = {
            "callbacks": {"Guard": {"average": 0.5, "low": 0.5, **state}}, "state_dict": weights, "global_step": step,
            "config": dataclasses.asdict(config), "format_version": FORMAT_VERSION,
        }  # fmt: skip
        torch.save(content, path)


@pytest.mark.parametrize(
    ("states", "abandoned", "chosen"),
    [
        ({600: {}, 800: {}, 852: None, 952: {}}, [], 800),  # 852 is damaged, and 952 may be in the rise already
        ({600: {}, 700: {}, 800: {}}, [[600, 900]], 600),  # saved in the rise of an earlier rewind
        ({600: {}, 700: {}, 800: {}}, [[600, 700], [700, 750]], 800),  # 700 and 800 are behind the rises
        ({600: {}, 800: {"average": 0.75}}, [], 600),  # more than half of the way from 0.5 to 0.9
        ({600: {}, 800: {"average": 0.75, "low": 0.7}}, [], 800),  # no rise: the later tables are harder
        ({600: {}, 800: {"average": 0.67}}, ["multiplier"], 600),
        ({700: {}, 800: {}}, [[600, 900]], None),
        ({600: {}, 801: {}}, [], 600),  # 801 was saved at a preemption, which must not change the run
        ({601: {}, 701: {"average": 0.75}}, [], 601),  # with another interval, perhaps
    ],
)
def test_a_rewind_goes_back_to_the_newest_good_checkpoint(states, abandoned, chosen, config, tmp_path):
    limits = {"multiplier": 0.001} if abandoned == ["multiplier"] else {}
    model = untrained_module(config).model
    pretend_to_have_saved(config, tmp_path, states, model)
    guard = watch(config, tmp_path, **limits)
    guard.abandoned = [] if limits else abandoned
    good = guard.choose(1000, model)
    assert (good and good["global_step"]) == chosen


@pytest.fixture
def short_memory(monkeypatch):
    monkeypatch.setattr(guard_module, "HORIZON", 2)
    monkeypatch.setattr(guard_module, "MEMORY", 0.5)


def test_a_run_is_rewound_to_the_last_good_checkpoint(tmp_path, short_memory, capsys):
    settings = [*SHORT_RUN_OF_ANY_FAMILY, *REWIND, "trainer.precision=fp16"]  # whose loss scale no step halves
    after = Look(10)
    train_short_run(tmp_path / "run", callbacks=(Ruin(9), after), settings=settings)
    stderr = capsys.readouterr().err
    assert "guard     back to the weights of step 8; steps up to 10 are skipped" in stderr
    good = read_checkpoint(tmp_path / "run/checkpoints/step-00000008.ckpt")
    assert all(torch.equal(v, good["state_dict"][k]) for k, v in after.weights.items())
    states = good["optimizer_states"][0]["state"]
    assert after.optimizer.keys() == states.keys()
    assert all(torch.equal(v, states[i][k]) for i, state in after.optimizer.items() for k, v in state.items())
    assert after.loss_scale == good["loss_scale"]["scale"] == 2**16
    decay = 11 / 20  # the average has seen step 10, with the weights of step 8
    for name, value in good["callbacks"]["Averages"]["ema"].items():
        expected = decay * value + (1 - decay) * good["state_dict"][f"model.{name}"]
        torch.testing.assert_close(after.ema[name], expected, rtol=1e-5, atol=1e-7)
    assert max(float(row["loss"]) for row in read_metrics(tmp_path / "run")[10:]) < 4
    assert len(read_metrics(tmp_path / "run")) == 16
    (incident,) = incidents(tmp_path / "run")
    assert incident["step"] == 9
    assert incident["action"] == "rewind"
    assert incident["back_to"] == 8
    state = last_checkpoint(tmp_path / "run")["callbacks"]["Guard"]
    assert state["abandoned"] == [[8, 10]] and state["average"] < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ruined", "good", "counts"),
    [
        (5, 4, {4}),  # exactly at the boundary: the next step is the one that forgets
        (7, 6, set()),  # the checkpoint at the boundary has the optimizer of the stage that ends there
    ],
)
def test_a_rewind_across_the_boundary_of_stages_has_the_optimizer_of_its_stage(
    ruined, good, counts, tmp_path, short_memory, monkeypatch
):
    monkeypatch.setattr(guard_module, "HORIZON", ruined + 1 - good)
    look, after = Look(ruined + 1), Look(ruined + 2)
    steps = f"trainer.max_steps={ruined + 3}"
    train_short_run(tmp_path / "run", *REWIND, steps, callbacks=(Ruin(ruined), look, after), settings=THREE_STAGES)
    assert last_checkpoint(tmp_path / "run")["callbacks"]["Guard"]["abandoned"] == [[good, ruined + 1]]
    assert {int(s["taken"]) for s in look.optimizer.values() if "taken" in s} == counts
    kept = 0 if ruined == 5 else max(counts, default=0)
    assert {int(s["taken"]) for s in after.optimizer.values() if "taken" in s} == {kept + 1}
