"""Folders for the Hugging Face Hub: written whole or not at all, and read back or refused."""

import ctypes
import io
import json
import os
import threading

import numpy as np
import pytest
import torch
from made_run import make_run
from safetensors import safe_open
from tiny_network import TINY, tiny_network

from tabicl_train import TabICLClassifier
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import export, load_checkpoint, read_weights
from tabicl_train.prediction.hub_format import load_hub, read_description
from tabicl_train.prediction.public_format import save_public

FILES = {"README.md", "config.json", "model.safetensors"}


@pytest.fixture
def run_dir(tmp_path):
    make_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def hub(run_dir, tmp_path):
    export(str(run_dir), str(tmp_path / "hub"))
    return tmp_path / "hub"


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_predicts_as_the_run_does(run_dir, hub):
    X, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 3
    of_run, of_hub = (TabICLClassifier(model, n_estimators=2).fit(X, y).predict_proba(X) for model in (run_dir, hub))
    assert np.array_equal(of_run, of_hub) and np.ptp(of_run) > 0.01


def test_its_files_say_where_the_weights_are_from(run_dir, tmp_path):
    export(str(run_dir), str(tmp_path / "hub"), weights="ema")
    assert set(files(tmp_path / "hub")) == FILES
    with safe_open(tmp_path / "hub" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {"run": "run", "step": "10", "weights": "ema", "commit": "c0ffee with uncommitted changes"}
    assert metadata == expected | {"format": "pt", "trained_range": "12 to 72 labeled rows, 2 to 6 features"}
    description = json.loads((tmp_path / "hub" / "config.json").read_text(), parse_constant=pytest.fail)
    assert description["library_name"] == "tabicl-train" and description["model"]["embed_dim"] == 16
    assert description["origin"]["config"]["curriculum"]["stages"]["smoke"]["steps"] == 20
    assert str(tmp_path) not in json.dumps(description)  # a folder of this machine


def test_an_export_to_it_replaces_it_whole(run_dir, hub, tmp_path):
    """While it is replaced again and again, a reader sees its three files at every moment."""
    stop, seen = threading.Event(), []

    def look():
        while not stop.is_set():
            seen.append((frozenset(os.listdir(hub)), read_description(hub)["origin"]["weights"]))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for weights in ("ema", "trained", "best", "ema"):
            export(str(run_dir), str(hub), weights=weights)
    finally:
        stop.set()
        reader.join()
    assert {names for names, _ in seen} == {frozenset(FILES)} and len({weights for _, weights in seen}) > 1
    assert read_weights(str(hub)).origin["weights"] == "ema"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hub"}


def test_an_empty_folder_and_a_link_to_a_folder_are_written_to(run_dir, hub, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("hub")
    for name in ("empty", "link"):
        export(str(run_dir), str(tmp_path / name), weights="best")
        assert load_hub(tmp_path / name).origin["weights"] == "best"
    assert (tmp_path / "link").is_symlink() and load_hub(hub).origin["weights"] == "best"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("notes.txt", r"the folder also holds notes\.txt, which would be lost"),
        ("README.md", r"its README\.md was edited and would be lost"),
        ("config.json", "tabicl-export did not write this folder"),
    ],
)
def test_a_folder_with_work_of_others_is_not_replaced(name, words, run_dir, hub):
    (hub / name).write_text('{"library_name": "transformers"}')
    before = files(hub)
    with pytest.raises(ConfigError, match=words):
        export(str(run_dir), str(hub), weights="ema")
    assert files(hub) == before


def test_a_run_and_a_file_are_not_replaced(run_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"also holds checkpoints and 2 more, which would be lost"):
        export(str(run_dir), str(run_dir))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is a file, not a folder"):
        export(str(run_dir), str(tmp_path / "file"))


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_everything_as_it_was(exists, failing, run_dir, hub, tmp_path, monkeypatch):
    before, output = files(hub), hub if exists else tmp_path / "other"
    opened = []

    def open_file(path, mode):
        opened.append(path)
        return io.FileIO("/dev/full", mode) if len(opened) == failing + 1 else open(path, mode)

    monkeypatch.setattr("tabicl_train.run_dir.atomic.open", open_file, raising=False)
    with pytest.raises(ConfigError) as caught:
        export(str(run_dir), str(output), weights="ema")
    assert caught.value.problems == [f"output is '{output}'; it cannot be written ([Errno 28] No space left on device)"]
    assert files(hub) == before and {path.name for path in tmp_path.iterdir()} == {"run", "hub"}


def test_a_file_system_that_cannot_exchange_folders_is_named(run_dir, hub, monkeypatch):
    before = files(hub)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(ConfigError, match="cannot replace a folder in one step: remove it first"):
        export(str(run_dir), str(hub), weights="ema")
    assert files(hub) == before and {path.name for path in hub.parent.iterdir()} == {"run", "hub"}


@pytest.mark.parametrize("name", sorted(FILES - {"README.md"}))
def test_a_folder_without_one_of_its_files_is_refused(name, hub):
    (hub / name).unlink()
    with pytest.raises(ConfigError, match=rf"hub has no {name}; it is incomplete"):
        load_checkpoint(str(hub))


def test_the_card_is_not_needed_to_load(hub):
    (hub / "README.md").unlink()
    assert load_checkpoint(str(hub))[0].embed_dim == 16


def test_weights_of_another_export_and_damaged_ones_are_refused(run_dir, hub, tmp_path):
    export(str(run_dir), str(tmp_path / "other"), weights="ema")
    weights = hub / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[-1] ^= 1
    for content in ((tmp_path / "other/model.safetensors").read_bytes(), bytes(whole)):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is damaged, or does not belong to the config\.json"):
            load_checkpoint(str(hub))
    weights.write_bytes(whole[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_checkpoint(str(hub))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"library_name": "transformers"}, r"config\.json was not written by tabicl-export"),
        ({"model": None}, r"config\.json was not written by tabicl-export"),
        ({"format_version": 2}, "was written by another version"),
        ({"model": {"new": 1}}, r"has model\.new=1, which this version of tabicl-train does not have"),
        ({"model": {"embed_dim": 32}}, "has shape|are missing|do not belong"),
    ],
)
def test_a_foreign_or_later_description_is_refused(change, words, hub):
    description = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(description | change))
    with pytest.raises(ConfigError, match=words):
        load_checkpoint(str(hub))
    (hub / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="was not written by tabicl-export"):
        load_checkpoint(str(hub))


def test_a_file_in_the_folder_is_no_checkpoint(hub):
    with pytest.raises(ConfigError, match=rf"not read from a file of this kind; name the folder, '{hub}'"):
        load_checkpoint(str(hub / "model.safetensors"))
    with pytest.raises(ConfigError, match="holds one set of weights; weights=best needs a checkpoint of a run"):
        load_checkpoint(str(hub), "best")


def test_weights_of_any_type_and_layout_are_written_as_fp32(tmp_path):
    network = tiny_network()
    weights = {name: w.t().contiguous().t() if w.dim() == 2 else w for name, w in network.state_dict().items()}
    save_public(TINY, weights, tmp_path / "tiny.ckpt")
    export(str(tmp_path / "tiny.ckpt"), str(tmp_path / "hub"))
    _, tensors = load_checkpoint(str(tmp_path / "hub"))
    assert all(torch.equal(tensors[name], w) and tensors[name].is_contiguous() for name, w in weights.items())
