"""The page From Python: its blocks, one after the other."""

import subprocess
import sys

from test_readme import blocks

import tabicl_train

PAGE = "tabicl_train/from_python.md"


def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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


def test_the_package_is_imported_without_torch_and_all_its_names_can_be_called():
    code = "import sys, tabicl_train; assert not {'torch', 'hydra', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(callable(getattr(tabicl_train, name)) for name in tabicl_train.__all__)
