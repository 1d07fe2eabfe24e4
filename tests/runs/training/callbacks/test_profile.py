import gzip
import json
from types import SimpleNamespace

import torch
from training_runs import train_short_run

from tabicl_train.training.callbacks.profile import Profile


def test_the_trace_holds_the_operations_of_its_steps(tmp_path, capsys):
    train_short_run(tmp_path / "run", "trainer.max_steps=3", "profile.step=1", "profile.steps=1")
    path = tmp_path / "run" / "profile" / "steps-1-1.json.gz"
    assert f"profile   {path}" in capsys.readouterr().err
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_run_that_ends_among_the_profiled_steps_has_a_trace_of_those_so_far(tmp_path):
    train_short_run(tmp_path / "run", "trainer.max_steps=2", "profile.step=1")
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["steps-1-1.json.gz"]


def test_a_profiled_step_that_runs_out_of_memory_leaves_a_snapshot(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    callback = Profile()
    callback.context = SimpleNamespace(records=SimpleNamespace(folder=tmp_path))
    state = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    callback.on_exception(state, torch.OutOfMemoryError("no memory"))
    assert not written, "nothing was profiled"
    callback.profiler = object()
    callback.on_exception(state, torch.OutOfMemoryError("no memory"))
    assert written == [str(tmp_path / "profile" / "out-of-memory.pickle")]
