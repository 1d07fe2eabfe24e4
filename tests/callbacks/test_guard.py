import dataclasses
import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from runs import assert_same_end, last, metrics
from short_runs import REWIND, SETTINGS, STAGES, Poison, Ruin, module_of, run

from tabicl_train import module
from tabicl_train import train as training
from tabicl_train.callbacks import guard
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles
from tabicl_train.callbacks.guard import Diverged
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import export
from tabicl_train.prediction.public_format import load_public
from tabicl_train.run_dir.checkpoint import read
from tabicl_train.run_dir.records import Records


class Look:
    """Weights, optimizer state, loss scale and average of the weights before a step."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.averages: Averages | None = None

    def keep(self, config) -> Averages:
        """In place of the class: the averages of a run."""
        self.averages = Averages(config)
        return self.averages

    def on_train_start(self, optimizer, **_) -> None:
        self.of_run = optimizer

    def on_train_batch_start(self, item, module, **_) -> None:
        if item.step == self.before:
            self.weights = {k: v.clone() for k, v in module.state_dict().items()}
            states = self.of_run.state_dict()["state"]
            self.optimizer = {i: {k: v.clone() for k, v in state.items()} for i, state in states.items()}
            self.loss_scale = module.loss_scale.scale.clone()
            if self.averages is not None:
                self.ema = {k: v.clone() for k, v in self.averages.ema.items()}


def incidents(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("optimizer=adamw",), ("trainer.log_every=7",)])
def test_steps_that_are_not_finite_change_nothing_and_are_written_down(settings, tmp_path):
    run_dir = tmp_path / "a run"
    poison = Poison({0, 5, 7})
    run(run_dir, *settings, callbacks=(poison,))
    unchanged = [
        i for i, (a, b) in enumerate(zip(poison.states, poison.states[1:], strict=False), 1)
        if all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    ]  # fmt: skip
    assert unchanged == [5, 7]
    assert all(torch.isfinite(v).all() for v in poison.states[-1])
    assert {int(row["skipped"]) for row in metrics(run_dir) if int(row["step"]) > 8} == {3}
    lines = incidents(run_dir)
    assert [(line["step"], line["seed"], line["stage"]) for line in lines] == [(s, 0, "smoke") for s in (0, 5, 7)]
    assert lines[0]["loss"] == "nan" and lines[0]["reason"] == "the loss is not finite"
    assert sorted(i for b in lines[1]["groups"] for i in b["tables"]) == list(range(8))
    assert shlex.split(lines[1]["replay"]) == ["tabicl-replay", f"run_dir={run_dir}", "step=5"]
    state = last(run_dir)["optimizer_states"][0]["state"].values()
    assert {int(s["taken"]) for s in state if "taken" in s} == {13}
    saved = read(run_dir / "checkpoints/step-00000008.ckpt")  # all that was known by then, logged or not
    assert saved["callbacks"]["Guard"]["skipped"] == 3


@pytest.mark.slow
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
    watch = Poison(set())
    torch.manual_seed(0)
    start = list(module_of(compose(SETTINGS)).model.parameters())
    run(tmp_path / "run", "trainer.max_steps=2", callbacks=(watch,))
    (incident,) = incidents(tmp_path / "run")
    assert incident["step"] == 0 and incident["reason"] == f"the {what} is not finite"
    first, second = watch.states
    assert all(torch.equal(a, b) for a, b in zip(start, first[: len(start)], strict=True))
    assert not any(v.any() for v in first[len(start) :])  # momenta and counts of steps
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_incidents_and_averages(tmp_path):
    averages = ("averages.last=2", "averages.every=5")
    run(tmp_path / "whole", *averages, callbacks=(Poison({3, 9}),))
    run(tmp_path / "torn", *averages, "trainer.max_steps=7", callbacks=(Poison({3, 9}),))
    (tmp_path / "torn/incidents.jsonl").open("a").write('{"step": 8}\n{"ste')  # done again after the restart
    run(tmp_path / "torn", *averages, callbacks=(Poison({3, 9}),))
    assert_same_end(tmp_path / "torn", tmp_path / "whole")
    a, b = (last(tmp_path / name)["callbacks"] for name in ("torn", "whole"))
    assert a["Guard"] == b["Guard"] and a["Guard"]["skipped"] == 2
    assert all(torch.equal(v, b["Averages"]["ema"][k]) for k, v in a["Averages"]["ema"].items())
    assert len(a["Averages"]["points"]) == 2
    for one, other in zip(a["Averages"]["points"], b["Averages"]["points"], strict=True):
        assert all(torch.equal(v, other[k]) for k, v in one.items())
    torn, whole = (
        [line | {"time": 0, "replay": 0} for line in incidents(tmp_path / name)] for name in ("torn", "whole")
    )
    assert torn == whole and [line["step"] for line in torn] == [3, 9]


@pytest.mark.slow
def test_too_many_such_steps_stop_the_run_with_a_diagnosis(tmp_path):
    with pytest.raises(Diverged, match=r"not finite in 3 steps in a row, .*incidents\.jsonl names them"):
        run(tmp_path / "a", "guard.skipped_in_a_row=3", callbacks=(Poison({2, 5, 6, 7}),))
    assert json.loads((tmp_path / "a/status.json").read_text())["status"] == "failed"
    with pytest.raises(Diverged, match="not finite in 3 steps, "):
        run(tmp_path / "b", "guard.skipped=3", callbacks=(Poison({2, 5, 9}),))


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["skipped_in_a_row", "skipped"])
def test_a_fault_between_two_looks_stops_the_run_and_none_that_is_over(limit, tmp_path):
    settings = (f"guard.{limit}=3", "trainer.log_every=10")
    with pytest.raises(Diverged, match="not finite in 3 steps"):
        run(tmp_path / "run", *settings, callbacks=(Poison({5, 6, 7}),))
    assert last(tmp_path / "run")["callbacks"]["Guard"]["skipped"] == 3  # saved after step 8
    with pytest.raises(Diverged, match="not finite in 4 steps"):
        run(tmp_path / "run", *settings, callbacks=(Poison({8}),))
    assert run(tmp_path / "run", *settings) == "finished"


@pytest.mark.slow
def test_a_loss_above_the_limit_warns_once_or_stops(tmp_path, capsys):
    limits = ("guard.after=6", "guard.loss=0.5")
    run(tmp_path / "warn", *limits)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("guard")]
    assert len(warnings) == 1 and "step 6: the moving average of the loss is 2." in warnings[0]
    assert [line["action"] for line in incidents(tmp_path / "warn")] == ["warn"]
    with pytest.raises(Diverged, match="step 6: the moving average of the loss"):
        run(tmp_path / "stop", *limits, "guard.action=stop")
    run(tmp_path / "quiet", "guard.after=6", "guard.loss=100", "guard.multiplier=100")
    assert not (tmp_path / "quiet/incidents.jsonl").exists()


@pytest.mark.slow
def test_a_runaway_multiplier_counts_only_while_the_loss_is_high(tmp_path, capsys):
    limits = ("guard.after=6", "guard.loss=100", "guard.multiplier=0.001")
    run(tmp_path / "low", *limits, "guard.multiplier_loss=50")
    run(tmp_path / "averaging", *limits, "guard.action=stop", "model.icl_scaling=ssa")  # its b is no such multiplier
    assert "guard " not in capsys.readouterr().err
    with pytest.raises(Diverged, match=r"the multiplier of icl\.0 at 512 labeled rows is .* above guard"):
        run(tmp_path / "high", *limits, "guard.action=stop")


def pretend_to_have_saved(config: RunConfig, states: dict[int, dict], model: torch.nn.Module) -> None:
    run_dir = Path(config.run_dir)
    (run_dir / "checkpoints").mkdir(parents=True)
    weights = {f"model.{name}": w for name, w in model.state_dict().items()}
    for step, state in states.items():
        path = run_dir / f"checkpoints/step-{step:08d}.ckpt"
        if state is None:
            path.write_bytes(b"damaged")
            continue
        guard_state = {"average": 0.5, "low": 0.5, **state}
        content = {
            "callbacks": {"Guard": guard_state}, "state_dict": weights, "global_step": step,
            "config": dataclasses.asdict(config),
        }  # fmt: skip
        torch.save(content, path)


@pytest.mark.parametrize(
    ("states", "abandoned", "chosen"),
    [
        ({600: {}, 800: {}, 850: None, 950: {}}, [], 800),  # 850 is damaged, and 950 may be in the rise already
        ({600: {}, 700: {}, 800: {}}, [[600, 900]], 600),  # saved in the rise of an earlier rewind
        ({600: {}, 700: {}, 800: {}}, [[600, 700], [700, 750]], 800),  # 700 and 800 are behind the rises
        ({600: {}, 800: {"average": 0.75}}, [], 600),  # more than half of the way from 0.5 to 0.9
        ({600: {}, 800: {"average": 0.65}}, [], 800),
        ({600: {}, 800: {"average": 0.75, "low": 0.7}}, [], 800),  # no rise: the later tables are harder
        ({600: {}, 800: {"average": 0.95, "low": 0.95}}, [], 600),
        ({600: {}, 800: {"average": 0.67}}, ["multiplier"], 600),
        ({700: {}, 800: {}}, [[600, 900]], None),
    ],
)
def test_a_rewind_goes_back_to_the_newest_good_checkpoint(states, abandoned, chosen, tmp_path):
    limits = ["guard.multiplier=0.001"] if abandoned == ["multiplier"] else []
    config = compose([*SETTINGS, f"run_dir={tmp_path}", *limits])
    model = module_of(config).model
    pretend_to_have_saved(config, states, model)
    watch = guard.Guard(config, Records(tmp_path), CheckpointFiles(config.checkpoint), Ranks(), None, None)
    watch.abandoned = [] if limits else abandoned
    good = watch.choose(1000, model)
    assert (good and good["global_step"]) == chosen


@pytest.fixture
def short_memory(monkeypatch):
    monkeypatch.setattr(guard, "HORIZON", 2)
    monkeypatch.setattr(guard, "MEMORY", 0.5)


@pytest.mark.slow
def test_a_run_is_rewound_to_the_last_good_checkpoint(tmp_path, short_memory, monkeypatch, capsys):
    settings = (*REWIND, "trainer.precision=fp16")
    after = Look(10)
    monkeypatch.setattr(training, "Averages", after.keep)
    run(tmp_path / "run", *settings, callbacks=(Ruin(9), after))
    stderr = capsys.readouterr().err
    assert "guard     back to the weights of step 8; steps up to 10 are skipped" in stderr
    good = read(tmp_path / "run/checkpoints/step-00000008.ckpt")
    assert all(torch.equal(v, good["state_dict"][k]) for k, v in after.weights.items())
    states = good["optimizer_states"][0]["state"]
    assert after.optimizer.keys() == states.keys()
    assert all(torch.equal(v, states[i][k]) for i, state in after.optimizer.items() for k, v in state.items())
    assert after.loss_scale == good["loss_scale"]["scale"] == 2**16
    decay = 11 / 20  # the average has seen step 10, with the weights of step 8
    for name, value in good["callbacks"]["Averages"]["ema"].items():
        expected = decay * value + (1 - decay) * good["state_dict"][f"model.{name}"]
        torch.testing.assert_close(after.ema[name], expected, rtol=1e-5, atol=1e-7)
    assert max(float(row["loss"]) for row in metrics(tmp_path / "run")[10:]) < 4
    assert len(metrics(tmp_path / "run")) == 16
    (incident,) = incidents(tmp_path / "run")
    assert incident["step"] == 9 and incident["action"] == "rewind" and incident["back_to"] == 8
    state = last(tmp_path / "run")["callbacks"]["Guard"]
    assert state["abandoned"] == [[8, 10]] and state["average"] < 4
    with pytest.raises(Diverged, match="there is no checkpoint from before that"):
        run(tmp_path / "early", *settings, callbacks=(Ruin(4),))
    with pytest.raises(Diverged, match="after 0 rewinds"):
        run(tmp_path / "never", *settings, "guard.rewinds=0", callbacks=(Ruin(9),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ruined", "settings", "good", "counts"),
    [
        (5, (), 4, {4}),  # exactly at the boundary: the next step is the one that forgets
        (7, (), 6, set()),  # the checkpoint at the boundary has the optimizer of the stage that ends there
        (9, (), 8, {2}),
        (7, ("curriculum.stages.stage2.fresh_optimizer=false",), 6, {6}),
        # Two boundaries at once, and only the first of the two stages forgets.
        (8, ("curriculum.stages.stage2.steps=1", "curriculum.stages.stage3.fresh_optimizer=false"), 6, set()),
    ],
)  # fmt: skip
def test_a_rewind_across_the_boundary_of_stages_has_the_optimizer_of_its_stage(
    ruined, settings, good, counts, tmp_path, short_memory, monkeypatch
):
    monkeypatch.setattr(guard, "HORIZON", ruined + 1 - good)
    look, after = Look(ruined + 1), Look(ruined + 2)
    steps = f"trainer.max_steps={ruined + 3}"
    run(tmp_path / "run", *REWIND, steps, *settings, callbacks=(Ruin(ruined), look, after), settings=STAGES)
    assert last(tmp_path / "run")["callbacks"]["Guard"]["abandoned"] == [[good, ruined + 1]]
    assert {int(s["taken"]) for s in look.optimizer.values() if "taken" in s} == counts
    kept = 0 if ruined == 5 else max(counts, default=0)
    assert {int(s["taken"]) for s in after.optimizer.values() if "taken" in s} == {kept + 1}


@pytest.mark.slow
def test_ema_follows_its_formula_and_exports(tmp_path):
    watch = Poison(set())
    run(tmp_path / "run", "averages.last=2", "averages.every=3", "trainer.max_steps=8", callbacks=(watch,))
    names = list(last(tmp_path / "run")["callbacks"]["Averages"]["ema"])
    count = len(names)
    expected = [w.double() for w in watch.states[0][:count]]
    for t, state in enumerate(watch.states, 1):
        decay = min(0.9, (1 + t) / (10 + t))
        expected = [decay * e + (1 - decay) * w for e, w in zip(expected, state[:count], strict=True)]
    with pytest.raises(ConfigError, match="weights is 'newest'; it must be one of trained, ema, last, best"):
        export(str(tmp_path / "run"), str(tmp_path / "newest.ckpt"), "newest")
    export(str(tmp_path / "run"), str(tmp_path / "ema.ckpt"), "ema")
    export(str(tmp_path / "run"), str(tmp_path / "last.ckpt"), "last")
    ema, mean = (load_public(tmp_path / f"{name}.ckpt")[1] for name in ("ema", "last"))
    for i, name in enumerate(names):
        torch.testing.assert_close(ema[name], expected[i].float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean[name], (watch.states[2][i] + watch.states[5][i]) / 2)
    with pytest.raises(ConfigError, match="holds one set of weights"):
        export(str(tmp_path / "ema.ckpt"), str(tmp_path / "again.ckpt"), "ema")
    run(tmp_path / "one", "averages.ema=0", "averages.last=1", "averages.every=1", "trainer.max_steps=1")
    with pytest.raises(ConfigError, match=r"keeps no such average: averages\.ema was 0"):
        export(str(tmp_path / "one"), str(tmp_path / "none.ckpt"), "ema")
    export(str(tmp_path / "one"), str(tmp_path / "one.ckpt"), "last")
    trained = last(tmp_path / "one")["state_dict"]
    assert all(torch.equal(w, trained[f"model.{name}"]) for name, w in load_public(tmp_path / "one.ckpt")[1].items())


@pytest.mark.slow
def test_an_average_that_was_switched_off_is_gone_and_starts_anew(tmp_path):
    for settings in (("trainer.max_steps=4",), ("averages.ema=0", "averages.last=0", "trainer.max_steps=6")):
        run(tmp_path / "run", "averages.last=2", "averages.every=1", *settings)
    for weights in ("ema", "last"):
        with pytest.raises(ConfigError, match=rf"keeps no such average: averages\.{weights} was 0"):
            export(str(tmp_path / "run"), str(tmp_path / "off.ckpt"), weights)
    watch = Poison(set())
    settings = ("averages.last=9", "averages.every=1", "trainer.max_steps=8")
    run(tmp_path / "run", *settings, callbacks=(watch,))
    averages = last(tmp_path / "run")["callbacks"]["Averages"]
    assert len(averages["points"]) == 2
    decay = 3 / 12
    for (name, value), first, second in zip(averages["ema"].items(), *watch.states, strict=False):
        assert torch.equal(averages["points"][0][name], first)
        torch.testing.assert_close(value, decay * first + (1 - decay) * second, rtol=1e-5, atol=1e-7)
