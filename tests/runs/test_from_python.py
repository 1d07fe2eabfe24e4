"""The page From Python: its blocks, one after the other."""

import subprocess
import sys
from dataclasses import replace

import lightning as L
import pytest
import torch
from test_readme import blocks

import tabicl_train
from tabicl_train import Pretraining, Tables
from tabicl_train.errors import ConfigError
from tabicl_train.weights.reader import read_weights

PAGE = "tabicl_train/from_python.md"


@pytest.mark.slow  # 5 CPU seconds, as the commands of other pages
def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))  # which the Trainer's module sets
    names: dict = {}
    for language, text in blocks(PAGE):
        assert language == "python"
        exec(text, names)
    assert names["status"] == "finished"
    assert names["curve"].index.tolist() == list(range(1, 11))
    assert names["scores"].index.tolist() == [5, 10]
    assert "synthetic" in names["scores"]
    assert names["next_step"] == 12
    assert names["vectors"].shape == (2, 38, names["network"].config.row_dim)
    assert names["weights"]["icl.0"].shape[1:] == (38, 112)

    trainer, config, checkpoint = names["trainer"], names["config"], "runs/lightning/step=5.ckpt"
    continued = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    continued.fit(Pretraining(config), Tables(config), ckpt_path=checkpoint)
    expected = read_weights("runs/mine", "newest").tensors
    found = [one.lightning_module.model.state_dict() for one in (trainer, continued)]
    for weights in (*found, read_weights("runs/lightning/step=10.ckpt").tensors):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert trainer.global_step == continued.global_step == 10
    assert trainer.logged_metrics.keys() == {"loss", "grad_norm", "val_loss"}
    with pytest.raises(ConfigError, match="the checkpoint is another run: seed was 0, is 1"):
        other = replace(config, seed=1)
        continued.fit(Pretraining(other), Tables(other), ckpt_path=checkpoint)


def test_the_package_is_imported_without_torch_and_all_its_names_can_be_called():
    code = "import sys, tabicl_train; assert not {'torch', 'hydra', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(callable(getattr(tabicl_train, name)) for name in tabicl_train.__all__)
