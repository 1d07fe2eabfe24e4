import errno
import importlib.metadata
import os
import random
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import command
from networks import tiny_network
from training_runs import SHORT_RUN, train_short_run

from priors.random import STREAM_VERSION
from tabicl_train import outputs
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CheckpointConfig
from tabicl_train.errors import ConfigError, Diverged
from tabicl_train.run import checkpoint
from tabicl_train.run.checkpoint import (
    FORMAT_VERSION,
    DamagedCheckpoint,
    checksums,
    newest_valid,
    read_checkpoint,
    saved,
)
from tabicl_train.run.status import read_status
from tabicl_train.training.callbacks import checkpoints
from tabicl_train.training.callbacks.checkpoints import CheckpointFiles, Checkpoints
from tabicl_train.training.callbacks.validation import Validation

CURRICULUM = compose(["experiment=smoke"]).curriculum  # of one stage of 20 steps


def content(step: int, size: int = 10) -> dict:
    config = {"curriculum": {"stages": {}}}
    return {"global_step": step, "config": config, "state_dict": {"w": torch.full((size,), float(step))}}


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path):
    path, damaged = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    torch.save(content(7, 300), path)
    data, generator = path.read_bytes(), random.Random(0)
    seen = 0
    for _ in range(150):
        place = generator.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        damaged.write_bytes(changed)
        try:
            result = read_checkpoint(damaged)
        except DamagedCheckpoint:
            seen += 1
        else:  # the bit lay in padding or in a date
            assert result["global_step"] == 7
            assert torch.equal(result["state_dict"]["w"], torch.full((300,), 7.0))
    assert seen > 75
    for length in [0, 1, len(data) - 1, *(generator.randrange(len(data)) for _ in range(20))]:
        damaged.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpoint, match=r"damaged\.ckpt"):
            read_checkpoint(damaged)


def test_a_file_of_another_kind_is_no_checkpoint(tmp_path):
    path = tmp_path / "some.ckpt"
    path.write_text("text")
    with pytest.raises(DamagedCheckpoint, match=r"some\.ckpt is not a checkpoint$"):
        read_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:  # such as a spreadsheet
        archive.writestr("a.xml", "b")
    with pytest.raises(DamagedCheckpoint, match=r"some\.ckpt is not a checkpoint$"):
        read_checkpoint(path)
    torch.save(Path("a"), path)
    with pytest.raises(DamagedCheckpoint, match=r"some\.ckpt is not a checkpoint$"):
        read_checkpoint(path)


def test_a_checkpoint_describes_itself(tmp_path):
    train_short_run(tmp_path / "run", "trainer.max_steps=1")
    content = read_checkpoint(saved(tmp_path / "run/checkpoints")[-1])
    assert content["config"]["model"]["embed_dim"] == 16
    assert content["config"]["prior"]["name"] == "dummy"
    facts = content["run"]
    assert (facts["step"], facts["stage"], facts["stage_step"], facts["address"]) == (1, "smoke", 1, [0, 1])
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert facts["commit"] == (head.stdout.strip() or None)
    assert facts["command"] == sys.argv and "diff" in facts
    assert content["format_version"] == FORMAT_VERSION
    assert facts["stream_version"] == STREAM_VERSION


def test_a_ring_of_recent_checkpoints_and_permanent_ones(tmp_path):
    files = CheckpointFiles(CheckpointConfig(every=2, keep=2, permanent_every=4), CURRICULUM)
    for step in (1, *range(2, 15, 2), 15, 17):  # 1, 15 and 17 at preemptions
        files.save(content(step), tmp_path / f"step-{step:08d}.ckpt")
        files.wait()
        (tmp_path / f"step-{step:08d}-backup.ckpt").write_bytes(b"a copy of the user's")
    assert [checkpoint.step_of(f) for f in saved(tmp_path)] == [4, 8, 10, 12, 14, 17]
    files = CheckpointFiles(CheckpointConfig(every=7, keep=3), CURRICULUM)  # the run continues with another interval
    files.save(content(18), tmp_path / "step-00000018.ckpt")
    files.wait()
    assert [checkpoint.step_of(f) for f in saved(tmp_path)] == [14, 17, 18]
    with pytest.raises(ConfigError, match="permanent_every is 5; it must be a multiple of every"):
        compose(["checkpoint.every=2", "checkpoint.permanent_every=5"])


def test_the_newest_intact_checkpoint_is_used_and_damaged_ones_are_reported(tmp_path, capsys):
    paths = [tmp_path / f"step-{step:08d}.ckpt" for step in (3, 6, 9)]
    for step, path in enumerate(paths):
        torch.save(content(step, 300), path)
    data = bytearray(paths[1].read_bytes())
    data[data.index(torch.full((300,), 1.0).numpy().tobytes()) + 5] ^= 4
    paths[1].write_bytes(data)
    paths[2].write_bytes(paths[2].read_bytes()[:-1000])
    assert newest_valid(tmp_path)[0] == newest_valid(tmp_path, until=3)[0] == paths[0]
    assert newest_valid(tmp_path, until=2) is None
    stderr = capsys.readouterr().err
    assert "step-00000009.ckpt is damaged" in stderr
    assert "step-00000006.ckpt: the checksum of" in stderr
    paths[0].write_bytes(b"")
    with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
        newest_valid(tmp_path)


def test_the_newest_good_checkpoint_is_from_before_any_skipped_step(tmp_path):
    for step, skipped in ((4, 0), (8, 1)):
        guarded = {"callbacks": {"Guard": {"in_a_row": skipped}}}
        torch.save(content(step) | guarded, tmp_path / f"step-{step:08d}.ckpt")
    assert checkpoint.newest_good(tmp_path).name == "step-00000004.ckpt"


def test_a_run_whose_checkpoint_holds_other_types_is_not_continued_in_one_line(tmp_path):
    settings = [*SHORT_RUN, f"run_dir={tmp_path}/run"]
    train_short_run(tmp_path / "run", "trainer.max_steps=1")
    (path,) = saved(tmp_path / "run/checkpoints")
    whole = torch.load(path, weights_only=True)
    name, weight = next(iter(whole["state_dict"].items()))
    for change in (
        {"state_dict": whole["state_dict"] | {name: weight > 0}},
        {"state_dict": whole["state_dict"] | {name: weight[:1]}},
        {"callbacks": whole["callbacks"] | {"Guard": [1]}},
        {"callbacks": whole["callbacks"] | {"Averages": {"ema": {"a": 1}}}},
        {"optimizer_states": [{"state": 3}]},
        {"run": {}},
        {"skipped": 3},
        {"config": {"curriculum": 3}},
    ):
        torch.save(whole | change, path)
        result = command("train", *settings, "trainer.max_steps=2")
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.returncode == 2 and len(errors) == 1, result.stderr
        assert result.stderr.endswith(f"{errors[0]}\n")


@pytest.mark.parametrize("other", [torch.ones(3), {"a": 1}, {"global_step": 9, "state_dict": {}}])
def test_a_file_of_another_program_is_passed_over_like_a_damaged_one(other, tmp_path, capsys):
    torch.save(content(8), tmp_path / "step-00000008.ckpt")
    torch.save(other, tmp_path / "step-00000009.ckpt")
    path, _ = newest_valid(tmp_path)
    assert path.name == "step-00000008.ckpt"
    assert "step-00000009.ckpt is not a checkpoint of a run" in capsys.readouterr().err


@pytest.mark.parametrize("change", [
    lambda weight: weight.view(-1)[3].add_(1e-6), lambda weight: weight.copy_(weight.flip(0)), torch.Tensor.neg_,
])  # fmt: skip
def test_no_checkpoint_is_written_of_ranks_with_different_weights(change):
    network, other = tiny_network(), tiny_network()
    sums = [checksums(copy.state_dict()) for copy in (network, other)]
    assert sums[0] == sums[1] and sums[0].keys() == network.state_dict().keys()
    name = "icl_predictor.decoder.0.weight"
    with torch.no_grad():
        change(other.get_parameter(name))
    context = SimpleNamespace(
        config=compose([*SHORT_RUN, "validation.every=4", "checkpoint.every=4"]),
        ranks=SimpleNamespace(size=3, gather=lambda own: [own, own, checksums(other.state_dict())]),
        status=None,
    )
    words = rf"after step 4, ranks 0 and 2 have different weights \({name}\), so no checkpoint is written"
    for callback in (Checkpoints(), Validation()):
        callback.context = context
        with pytest.raises(Diverged, match=words):
            callback.after_step(SimpleNamespace(step=4, network=network), None)


def test_a_full_disk_ends_the_run_with_one_line(tmp_path, monkeypatch):
    run_dir, save = tmp_path / "run", torch.save

    def refuse(*arguments):
        if list((run_dir / "checkpoints").glob(".step-00000008.*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*arguments)

    monkeypatch.setattr(torch, "save", refuse)
    result = command("train", *SHORT_RUN, f"run_dir={run_dir}")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert line.startswith(f"error: {run_dir}/checkpoints/step-00000008.ckpt could not be written: No space")
    assert line.endswith("and the same command continues from the newest one")
    assert read_status(run_dir)["status"] == "failed"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004.ckpt"]


def test_training_goes_on_while_a_copy_is_written(tmp_path, monkeypatch):
    go, save = threading.Event(), outputs.save_atomically
    monkeypatch.setattr(checkpoints, "save_atomically", lambda *a: (go.wait(60), save(*a)))
    files = CheckpointFiles(CheckpointConfig(every=1, keep=1), CURRICULUM)
    old = tmp_path / "step-00000001.ckpt"
    torch.save(content(1), old)
    state = content(2) | {"gpu": OrderedDict(w=torch.empty(1, device="meta"))}  # as of a module
    with pytest.raises(NotImplementedError, match="no data"):
        files.save(state, tmp_path / "step-00000002.ckpt")  # would stay on the GPU otherwise
    state = content(2) | {"callbacks": {"counts": [1, 2], "array": np.array([3])}}
    names = []
    monkeypatch.setattr(os, "replace", lambda a, b, replace=os.replace: (replace(a, b), names.append(Path(b).stem)))
    files.save(state, tmp_path / "step-00000002.ckpt", tmp_path / "stage-a.ckpt")
    state["state_dict"]["w"].add_(100)  # the step after the save
    state["callbacks"]["counts"].append(3)
    assert saved(tmp_path) == [old]  # kept until the new one is there
    go.set()
    files.wait()
    assert [f.name for f in saved(tmp_path)] == ["step-00000002.ckpt"]
    written = torch.load(saved(tmp_path)[0], weights_only=False)
    assert torch.equal(written["state_dict"]["w"], torch.full((10,), 2.0))
    assert written["callbacks"]["counts"] == [1, 2]
    assert (tmp_path / "stage-a.ckpt").read_bytes() == saved(tmp_path)[0].read_bytes()
    assert names == ["stage-a", "step-00000002"]  # a run that is killed in between saves the step again


def test_damaged_newer_files_do_not_push_out_the_good_one(tmp_path):
    files = CheckpointFiles(CheckpointConfig(every=1, keep=2), CURRICULUM)
    for step in (7, 8, 9):
        (tmp_path / f"step-{step:08d}.ckpt").write_bytes(b"cut off")
    for step in (3, 4, 5):
        files.save(content(step), tmp_path / f"step-{step:08d}.ckpt")
        files.wait()
        assert newest_valid(tmp_path)[1]["global_step"] == step
    assert [checkpoint.step_of(f) for f in saved(tmp_path)] == [4, 5, 7, 8, 9]


def test_a_file_that_cannot_be_read_is_not_skipped(tmp_path, monkeypatch):
    for step in (1, 2):
        torch.save(content(step), tmp_path / f"step-{step:08d}.ckpt")
    for error in (PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "Input/output error"),
                  MemoryError("no memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):  # fmt: skip

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(torch, "load", fail)
        with pytest.raises(ConfigError, match=r"step-00000002\.ckpt cannot be read: "):
            newest_valid(tmp_path)


def test_a_file_that_is_removed_while_it_is_looked_for(tmp_path, monkeypatch):
    """As a run in progress does: by then there is a newer file."""
    torch.save(content(1), tmp_path / "step-00000001.ckpt")
    listed = saved(tmp_path)
    (tmp_path / "step-00000001.ckpt").unlink()
    torch.save(content(2), tmp_path / "step-00000002.ckpt")
    lists = [listed]
    monkeypatch.setattr(checkpoint, "saved", lambda folder: lists.pop() if lists else saved(folder))
    assert newest_valid(tmp_path)[1]["global_step"] == 2
