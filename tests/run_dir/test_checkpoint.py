import contextlib
import errno
import importlib.metadata
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from command_line import command

from priors.random import STREAM_VERSION
from tabicl_train.callbacks import checkpoints
from tabicl_train.callbacks.checkpoints import CheckpointFiles, SaveFailed
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CheckpointConfig
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir import atomic, checkpoint
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint, newest_valid, read, saved
from tabicl_train.run_dir.status import read_status
from tabicl_train.train import train

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=12",
    "checkpoint.every=3", "trainer.accelerator=cpu",
]  # fmt: skip


def run(run_dir: Path, *overrides: str) -> str:
    return train(compose([*SETTINGS, f"run_dir={run_dir}", *overrides]))


def names(run_dir: Path) -> list[str]:
    return [f.stem for f in saved(run_dir / "checkpoints")]


def content(step: int, size: int = 10) -> dict:
    config = {"curriculum": {"stages": {}}}
    return {"global_step": step, "config": config, "state_dict": {"w": torch.full((size,), float(step))}}


def assert_same_weights(a: Path, b: Path) -> None:
    one, other = (read(saved(folder / "checkpoints")[-1]) for folder in (a, b))
    assert one["global_step"] == other["global_step"] == 12
    assert all(torch.equal(v, other["state_dict"][k]) for k, v in one["state_dict"].items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(run_dir)
    return run_dir


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path):
    path, damaged = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    torch.save(content(7, 300), path)
    data, generator = path.read_bytes(), random.Random(0)
    seen = 0
    for _ in range(400):
        place = generator.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        damaged.write_bytes(changed)
        try:
            result = read(damaged)
        except DamagedCheckpoint:
            seen += 1
        else:  # the bit lay in padding or in a date
            assert result["global_step"] == 7 and torch.equal(result["state_dict"]["w"], torch.full((300,), 7.0))
    assert seen > 200
    for length in [0, 1, len(data) - 1, *(generator.randrange(len(data)) for _ in range(40))]:
        damaged.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpoint, match=r"damaged\.ckpt"):
            read(damaged)


@pytest.mark.multi_process
def test_a_checkpoint_describes_itself(whole):
    content = read(saved(whole / "checkpoints")[-2])
    assert content["config"]["model"]["embed_dim"] == 16 and content["config"]["prior"]["name"] == "dummy"
    facts = content["run"]
    assert (facts["step"], facts["stage"], facts["stage_step"], facts["address"]) == (
        9, "smoke", 9, [0, 9],
    )  # fmt: skip
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert facts["commit"] == (head.stdout.strip() or None)
    assert facts["command"] == sys.argv and "diff" in facts
    assert content["format_version"] == 1 and facts["stream_version"] == STREAM_VERSION
    assert (whole / "provenance.jsonl").read_text().count("\n") == 1


def test_a_ring_of_recent_checkpoints_and_permanent_ones(tmp_path):
    files = CheckpointFiles(CheckpointConfig(every=2, keep=2, permanent_every=4))
    for step in range(2, 15, 2):
        files.save(content(step), tmp_path / f"step-{step:08d}.ckpt")
    files.wait()
    assert [checkpoint.step_of(f) for f in saved(tmp_path)] == [4, 8, 10, 12, 14]
    with pytest.raises(ConfigError, match="permanent_every is 5; it must be a multiple of every"):
        compose(["checkpoint.every=2", "checkpoint.permanent_every=5"])


@pytest.mark.slow
def test_the_newest_intact_checkpoint_is_used_and_damaged_ones_are_reported(whole, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run(run_dir, "trainer.max_steps=9")
    (_, middle, newest) = saved(run_dir / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-1000])
    data = bytearray(middle.read_bytes())
    data[data.index(read(middle)["state_dict"]["model.row_interactor.cls_tokens"].numpy().tobytes()) + 5] ^= 4
    middle.write_bytes(data)
    run(run_dir)
    stderr = capsys.readouterr().err
    assert "step-00000009.ckpt is damaged" in stderr and "step-00000006.ckpt: the checksum of" in stderr
    assert "resumed at step 3" in stderr
    assert_same_weights(run_dir, whole)
    for path in saved(run_dir / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
        run(run_dir)


@pytest.mark.slow
def test_resuming_reads_the_checkpoint_once(tmp_path, monkeypatch):
    run(tmp_path / "run", "trainer.max_steps=2")
    reads = []
    monkeypatch.setattr(checkpoint, "read", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr(torch, "load", lambda *a, load=torch.load, **k: reads.append("load") or load(*a, **k))
    run(tmp_path / "run", "trainer.max_steps=3")
    assert [getattr(r, "name", r) for r in reads] == ["step-00000002.ckpt", "load"]


@pytest.mark.multi_process
def test_two_ranks_fall_back_to_the_same_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    run(run_dir, "trainer.max_steps=6")
    saved(run_dir / "checkpoints")[-1].write_bytes(b"cut off")
    settings = [*SETTINGS, f"run_dir={run_dir}", "trainer.devices=2", "trainer.max_steps=8"]
    codes = forked.run_ranks(forked.train, *settings, folder=tmp_path)
    stderr = (tmp_path / "stderr.0").read_text()
    assert codes == [0, 0], stderr
    assert "step-00000006.ckpt is damaged" in stderr and "resumed at step 3" in stderr
    assert newest_valid(run_dir / "checkpoints")[1]["run"]["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["write", "fsync"])
def test_a_full_disk_ends_the_run_with_one_line_and_the_same_command_continues(place, whole, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"

    def refuse(*_):
        if list((run_dir / "checkpoints").glob(".step-00000006.*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save, fsync = torch.save, os.fsync
    with monkeypatch.context() as full_disk:
        if place == "write":
            full_disk.setattr(atomic.torch, "save", lambda *a: (refuse(), save(*a)))
        else:
            full_disk.setattr(atomic.os, "fsync", lambda fd: (refuse(), fsync(fd)))
        result = command("train", *SETTINGS, f"run_dir={run_dir}")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert line.startswith(f"error: {run_dir}/checkpoints/step-00000006.ckpt could not be written: [Errno 28] No space")
    assert line.endswith("and the same command continues from the newest one")
    assert read_status(run_dir)["status"] == "failed"
    assert names(run_dir) == ["step-00000003"] and not list((run_dir / "checkpoints").glob(".*"))
    run(run_dir)
    assert_same_weights(run_dir, whole)


@pytest.mark.multi_process
def test_a_real_full_file_system(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system is not allowed here")
    try:
        files = CheckpointFiles(CheckpointConfig(keep=1))
        for step, size in ((1, 30_000), (2, 60_000), (3, 30_000)):
            files.save(content(step, size), tmp_path / f"step-{step:08d}.ckpt")
            with pytest.raises(SaveFailed) if step == 2 else contextlib.nullcontext():
                files.wait()
            path, found = newest_valid(tmp_path)
            assert found["global_step"] == {1: 1, 2: 1, 3: 3}[step]
            assert [f.name for f in tmp_path.iterdir()] == [path.name]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def train_and_die_in_a_save(folder: Path, *settings: str) -> None:
    fsync = os.fsync

    def die(fd):  # in the middle of the third save
        if list(folder.glob(".step-00000009.*")):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(fd)

    os.fsync = die
    forked.train(*settings)


@pytest.mark.multi_process
def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(whole, tmp_path, capsys):
    run_dir = tmp_path / "run"
    settings = [*SETTINGS, f"run_dir={run_dir}"]
    killed = forked.start(train_and_die_in_a_save, run_dir / "checkpoints", *settings)
    assert forked.exit_code(killed) == -signal.SIGKILL
    assert len(list((run_dir / "checkpoints").glob(".*.tmp"))) == 1
    run(run_dir)
    assert "resumed at step 6" in capsys.readouterr().err
    assert_same_weights(run_dir, whole)
    assert not list((run_dir / "checkpoints").glob(".*"))


def test_training_goes_on_while_a_copy_is_written(tmp_path, monkeypatch):
    go, save = threading.Event(), atomic.save_atomically
    monkeypatch.setattr(checkpoints, "save_atomically", lambda *a: (go.wait(60), save(*a)))
    files = CheckpointFiles(CheckpointConfig(keep=1))
    old = tmp_path / "step-00000001.ckpt"
    torch.save(content(1), old)
    state = content(2) | {"callbacks": {"counts": [1, 2], "array": np.array([3])}}
    files.save(state, tmp_path / "step-00000002.ckpt", tmp_path / "stage-a.ckpt")
    state["state_dict"]["w"].add_(100)  # the step after the save
    state["callbacks"]["counts"].append(3)
    assert saved(tmp_path) == [old]  # kept until the new one is there
    go.set()
    files.wait()
    assert [f.name for f in saved(tmp_path)] == ["step-00000002.ckpt"]
    written = torch.load(saved(tmp_path)[0], weights_only=False)
    assert torch.equal(written["state_dict"]["w"], torch.full((10,), 2.0)) and written["callbacks"]["counts"] == [1, 2]
    assert (tmp_path / "stage-a.ckpt").read_bytes() == saved(tmp_path)[0].read_bytes()


def test_an_error_of_the_program_surfaces_at_the_next_save(tmp_path, monkeypatch):
    files = CheckpointFiles(CheckpointConfig())
    monkeypatch.setattr(checkpoints, "to_host", lambda value: value)  # a lambda does not survive the copy either
    files.save({"global_step": lambda: None}, tmp_path / "step-00000001.ckpt")
    with pytest.raises(Exception, match=r"pickle|local object"):
        files.save(content(2), tmp_path / "step-00000002.ckpt")
    assert not list(tmp_path.iterdir())


def test_damaged_newer_files_do_not_push_out_the_good_one(tmp_path):
    files = CheckpointFiles(CheckpointConfig(keep=2))
    for step in (7, 8, 9):
        (tmp_path / f"step-{step:08d}.ckpt").write_bytes(b"cut off")
    for step in (3, 4, 5):
        files.save(content(step), tmp_path / f"step-{step:08d}.ckpt")
        files.wait()
        assert newest_valid(tmp_path)[1]["global_step"] == step
    assert [checkpoint.step_of(f) for f in saved(tmp_path)] == [4, 5, 7, 8, 9]


def test_a_copy_under_another_name_is_ignored(tmp_path):
    files = CheckpointFiles(CheckpointConfig(keep=1))
    files.save(content(10), tmp_path / "step-00000010.ckpt")
    files.wait()
    copy = tmp_path / "step-00000010-backup.ckpt"
    copy.write_bytes((tmp_path / "step-00000010.ckpt").read_bytes())
    files.save(content(12), tmp_path / "step-00000012.ckpt")
    files.wait()
    assert [f.name for f in saved(tmp_path)] == ["step-00000012.ckpt"] and copy.exists()


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


def test_a_kill_after_any_rename_leaves_no_stage_without_its_file(tmp_path, monkeypatch):
    """The stage's name first: a run that is killed in between saves the step again."""
    names = []
    monkeypatch.setattr(os, "replace", lambda a, b, replace=os.replace: (replace(a, b), names.append(Path(b).name)))
    files = CheckpointFiles(CheckpointConfig())
    files.save(content(1), tmp_path / "step-00000001.ckpt", tmp_path / "stage-a.ckpt")
    files.wait()
    assert names == ["stage-a.ckpt", "step-00000001.ckpt"]
    assert (tmp_path / "stage-a.ckpt").read_bytes() == (tmp_path / "step-00000001.ckpt").read_bytes()
