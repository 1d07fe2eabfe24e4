"""Suites of tasks and export formats of plug-ins."""

import numpy as np
import pandas as pd
import pytest
import torch
from networks import TINY, tiny_network

from tabicl_train import register
from tabicl_train.config.documentation import help_text
from tabicl_train.config.options import EvaluateOptions, ExportOptions
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.suites import Source, sources
from tabicl_train.model import TabICL
from tabicl_train.weights import export as export_module
from tabicl_train.weights.export import export, predictor, save_public, write_onnx
from tabicl_train.weights.pretrained import Pretrained
from tabicl_train.weights.reader import build_network


def test_a_suite_may_take_the_tasks_to_score(fresh):
    @register.suite("chosen")
    def chosen(folder, numbers, tasks="all"):
        for name in tasks.split(","):
            yield Source(name, lambda: None)

    assert [source.name for source in sources("chosen", None, tasks="a,b")] == ["a", "b"]
    assert [source.name for source in sources("chosen", None)] == ["all"]


def test_a_suite_lists_its_tasks_and_reads_them_later(fresh):
    read = []

    @register.suite("lines")
    def lines(folder, numbers):
        for name in ("one", "two", folder or "three"):

            def read_table(name=name):
                read.append(name)
                x = np.arange(40.0)
                return pd.DataFrame({"x": x, "y": x if numbers else x > 20}), "y"

            yield Source(name, read_table)

    of_classes = sources("lines", None)
    of_numbers = sources("lines", "elsewhere", numbers=True)
    assert read == []
    assert [source.name for source in of_numbers] == ["one", "two", "elsewhere"]
    assert not of_classes[1].load(100).is_regression
    assert of_numbers[0].load(100).is_regression
    assert read == ["two", "one"]
    with pytest.raises(ConfigError, match="suite=lines has two tasks called 'one'"):
        sources("lines", "one")
    with pytest.raises(ConfigError, match="there is no suite 'line'; did you mean 'lines'"):
        sources("line", None)
    with pytest.raises(ConfigError, match="tasks is 'two'"):
        sources("lines", None, tasks="two")
    assert "Plug-ins add lines." in help_text(EvaluateOptions)
    assert "Plug-ins" not in help_text(ExportOptions)


def test_a_format_is_chosen_by_its_suffix_and_always_compared(fresh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_public(TINY, tiny_network().state_dict(), "m.ckpt")

    def read(path):
        with np.load(path) as file:
            tensors = {name: torch.from_numpy(file[name]) for name in file}
        return predictor(build_network(Pretrained(TINY, tensors)))

    factor = 1.0

    @register.export_format("arrays", suffixes=(".npz",), predictor=read)
    def write(pretrained, network, path, check):
        np.savez(path, **{name: factor * tensor.numpy() for name, tensor in pretrained.tensors.items()})
        return "loads with numpy"

    assert export("m.ckpt", "m.npz").endswith("parameters, loads with numpy")
    factor = 2.0
    with pytest.raises(ConfigError, match=r"m\.npz is not written: its logits differ"):
        export("m.ckpt", "m.npz")
    assert not (tmp_path / "m.npz").exists()
    with pytest.raises(ConfigError, match=r"FOLDER \(hub\), FILE.onnx \(onnx\) or FILE.npz \(arrays\)"):
        export("m.ckpt", "m.foo")
    register.export_format("other", write, suffixes=(".pt",))
    with pytest.raises(ConfigError, match=r"output is 'm\.pt', which may be tabicl or other; set format=NAME"):
        export("m.ckpt", "m.pt")
    with pytest.raises(ConfigError, match="two export formats are called 'onnx'"):
        register.export_format("onnx", write, suffixes=(".onnx",))


def test_a_folder_that_a_format_did_not_check_is_removed_unless_it_was_there(fresh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_public(TINY, tiny_network().state_dict(), "m.ckpt")

    def read(path):
        with np.load(path / "x.npz") as file:
            tensors = {name: torch.from_numpy(file[name]) for name in file}
        return predictor(build_network(Pretrained(TINY, tensors)))

    @register.export_format("folder", suffixes=(".folder",), predictor=read, problems=lambda output: [])
    def write(pretrained, network, path, check):
        path.mkdir(exist_ok=True)
        np.savez(path / "x.npz", **{name: 2 * tensor.numpy() for name, tensor in pretrained.tensors.items()})
        return "loads with numpy"

    with pytest.raises(ConfigError, match=r"m\.folder is not written: its logits differ"):
        export("m.ckpt", "m.folder")
    assert not (tmp_path / "m.folder").exists()
    (tmp_path / "m.folder").mkdir()
    (tmp_path / "m.folder/notes.txt").touch()
    with pytest.raises(ConfigError, match="the folder was there before, so what was written to it stays"):
        export("m.ckpt", "m.folder")
    assert (tmp_path / "m.folder/notes.txt").exists()


class Tripled(TabICL):
    def forward(self, pack, checkpoint_rows=None):
        return 3 * super().forward(pack, checkpoint_rows)


def test_onnx_of_another_network_is_one_line(tmp_path, monkeypatch):
    def export_onnx(network, words):
        with pytest.raises(ConfigError) as caught:
            write_onnx(Pretrained(TINY, {}), network, tmp_path / "m.onnx", lambda path: None)
        (problem,) = caught.value.problems
        assert words in problem
        assert problem.endswith("format=hub exports any network")
        assert "\n" not in problem

    def fail(*arguments):
        raise RuntimeError("no such operation\nin many lines")

    export_onnx(Tripled(TINY).eval(), "Tripled has its own")
    monkeypatch.setattr(export_module, "save_onnx", fail)  # as the converter of torch may
    export_onnx(tiny_network().eval(), "cannot convert TabICL (RuntimeError: no such operation)")
