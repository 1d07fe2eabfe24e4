import inspect
import re
from pathlib import Path

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser

import tabicl_train
from tabicl_train.config import hydra_internals
from tabicl_train.config.folders import CONFIG_DIR


def test_hydra_has_the_private_functions_that_are_used():
    expected = {
        _run_hydra: ["args", "args_parser", "task_function", "config_path", "config_name", "caller_stack_depth"],
        create_config_search_path: ["search_path_dir"],
        Hydra.create_main_hydra2: ["task_name", "config_search_path"],
        get_args_parser: [],
    }
    for function, parameters in expected.items():
        assert list(inspect.signature(function).parameters) == parameters, f"{function.__name__}, {hydra.__version__}"
    assert "self.repository" in inspect.getsource(ConfigLoaderImpl.__init__)
    used = ["overrides", "help", "hydra_help", "shell_completion", "cfg", "info", "multirun"]
    used += ["config_path", "config_name", "config_dir"]
    assert vars(get_args_parser().parse_args([])).keys() >= set(used)


@pytest.mark.parametrize("folder", ["main", "extra"])
def test_both_folders_are_searched(folder, tmp_path):
    (tmp_path / "main").mkdir()
    (tmp_path / "extra").mkdir()
    (tmp_path / folder / "some.yaml").write_text("value: 3\n")
    with hydra_internals.searching(tmp_path / "main", str(tmp_path / "extra")):
        assert hydra_internals.file_exists("some") and not hydra_internals.file_exists("other")
        assert hydra.compose("some", ["value=4"]).value == 4


def test_a_task_is_run_with_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.yaml").write_text(
        "defaults: [override hydra/job_logging: disabled, override hydra/hydra_logging: disabled, _self_]\n"
        "value: 3\nhydra: {output_subdir: null, run: {dir: .}}\n"
    )
    parser = hydra_internals.get_args_parser()
    seen = []
    arguments = parser.parse_args(["value=4"])
    hydra_internals.hydra_main(arguments, parser, lambda tree: seen.append(tree.value), tmp_path, "some")
    assert seen == [4]


def test_private_parts_of_hydra_are_used_in_one_module_only():
    package = Path(tabicl_train.__file__).parent
    private = re.compile(r"hydra\._internal|import _run_hydra|\.repository\b")
    users = {path.name for path in package.rglob("*.py") if private.search(path.read_text())}
    assert users == {"hydra_internals.py"} and CONFIG_DIR.is_dir()
