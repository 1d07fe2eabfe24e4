"""What decides scores: whatever of it changes is named, and then they are computed again."""

import dataclasses
import importlib
import sys
from importlib import metadata

import pandas as pd
import pytest
import torch
from command_line import command
from networks import TINY, tiny_network

from tabicl_train.config.options import EvaluateOptions
from tabicl_train.evaluation import arms
from tabicl_train.evaluation import identity as identities
from tabicl_train.evaluation.baselines import BASELINES
from tabicl_train.evaluation.identity import identity, identity_changes
from tabicl_train.weights.export import save_public
from tabicl_train.weights.pretrained import Pretrained

PRETRAINED = Pretrained(TINY, {"a": torch.ones(2), "b": torch.zeros(2)})
ESTIMATOR = "from made_base import Base\nclass Made(Base):\n    pass\n"
BASE = "from sklearn.dummy import DummyClassifier\nclass Base(DummyClassifier):\n    pass\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The folder of a baseline whose class has a file of its own, and its base class another one."""
    (tmp_path / "made_estimator.py").write_text(ESTIMATOR)
    (tmp_path / "made_base.py").write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("made_estimator", "made_base"):
        monkeypatch.setitem(sys.modules, name, None)  # forgotten at the end
        del sys.modules[name]
    monkeypatch.setattr(arms, "baseline_names", arms.baseline_names.__wrapped__)  # without its cache
    monkeypatch.setitem(BASELINES, "made", lambda: importlib.import_module("made_estimator").Made())
    return tmp_path


def now(pretrained: Pretrained = PRETRAINED, **options) -> dict:
    return identity(EvaluateOptions(checkpoint="tiny", suite="sklearn", **options), pretrained, [], ["made"])


@pytest.mark.parametrize("package", ["scikit-learn", "numpy", "torch"])
def test_versions_of_packages(package, made, monkeypatch):
    before = now()
    assert identity_changes(before, now()) == []
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.9" if name == package else version(name))
    assert identity_changes(before, now()) == [f"{package} was {version(package)}, is 0.9"]


@pytest.mark.parametrize("file", ["made_estimator", "made_base"])
def test_source_files_of_an_estimator(file, made):
    before = now()
    with open(made / f"{file}.py", "a") as source:
        source.write("    strategy = 'uniform'\n")
    assert f"the code of {file} changed" in identity_changes(before, now())  # and that of what imports it


def test_source_files_of_this_package(made, monkeypatch):
    own = made / "own"
    own.mkdir()
    (own / "ensemble.py").write_text("members = 8\n")
    monkeypatch.setattr(identities, "FOLDERS", (*identities.FOLDERS, str(own)))
    before = now()
    (own / "ensemble.py").write_text("members = 9\n")
    assert identity_changes(before, now()) == ["the code of tabicl-train changed"]


@pytest.mark.parametrize(
    ("pretrained", "said"),
    [
        (dict(tensors={"a": torch.ones(2), "b": torch.tensor([0.0, 1e-30])}), "weights changed"),
        (dict(tensors={"a": torch.ones(2), "c": torch.zeros(2)}), "weights changed"),
        (dict(tensors={"a": torch.ones(2), "b": torch.zeros(2, dtype=torch.int32)}), "weights changed"),
        (dict(config=dataclasses.replace(TINY, icl_num_heads=1)), "network changed"),
        (
            dict(origin={"trained_range": {"labeled_rows": [8, 90], "features": [1, 5]}}),
            "trained_range was None, is 8 to 90 labeled rows, 1 to 5 features, up to 10 classes",
        ),
    ],
)
def test_weights_and_what_a_file_says_of_them(pretrained, said, made):
    assert identity_changes(now(), now(dataclasses.replace(PRETRAINED, **pretrained))) == [said]


def test_a_comparison_scores_again_and_says_why(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_public(TINY, tiny_network().state_dict(), "tiny.ckpt")
    table = pd.DataFrame({"a": range(60), "label": ["x"] * 20 + ["y"] * 40})
    table.to_csv("one.csv", index=False)
    (tmp_path / "tasks.csv").write_text("item,target\none.csv,label\n")
    words = ["tiny.ckpt", "made", "suite=folder", "folder=.", "n_estimators=1", "splits=1", "metric=accuracy"]

    def compared() -> tuple[str, float]:
        result = command("compare", *words)
        assert result.returncode == 0, result.stderr
        (said,) = [line for line in result.stderr.splitlines() if line.startswith("score ")] or [""]
        return said, pd.read_csv("comparison/comparison.csv")["mean_b"].item()

    assert compared() == ("score     tiny.ckpt", pytest.approx(12 / 18))
    assert compared()[0] == ""
    (made / "made_estimator.py").write_text(
        ESTIMATOR.replace("pass", "def predict_proba(self, X): return 1 - super().predict_proba(X)")
    )
    for name in ("made_estimator", "made_base"):
        del sys.modules[name]
    assert compared() == ("score     tiny.ckpt again: the code of made_estimator changed", pytest.approx(6 / 18))
    for path in (tmp_path / "comparison/scores").glob("*.json"):
        path.unlink()  # as an earlier version has left it
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.9" if name == "scikit-learn" else version(name))
    said, _ = compared()
    assert said.startswith("score     tiny.ckpt again: it is not known how tiny-") and said.endswith(".csv was made")
