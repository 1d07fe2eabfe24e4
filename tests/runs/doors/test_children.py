"""Plug-ins in the processes that commands and estimators start, and in what is pickled or stored for them."""

import os
import pickle
import sys
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import joblib
import numpy as np
import pytest
import torch
from command_line import command
from forked import start_process, wait_for_exit_code
from plugin_folder import SOURCE, forget_plugins
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from training_runs import last_checkpoint, train_short_run

from priors.hdf5 import read_contents
from tabicl_train import TabICLClassifier, plugins
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import StreamConfig, configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.stream import workers
from tabicl_train.stream.ray_actors import Drawer
from tabicl_train.stream.steps import StepStream
from tabicl_train.stream.workers import Loader, Steps
from tabicl_train.sweep import jobs
from tabicl_train.sweep.plan import make_plan
from tabicl_train.sweep.study import open_study
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.resume import find_checkpoint
from tabicl_train.weights.pretrained import network_config
from tabicl_train.weights.reader import load_network

SMOKE = ["experiment=smoke", "trainer.accelerator=cpu", "stream.num_workers=0", "plugins=[./mine.py]"]
X, y = np.random.default_rng(0).standard_normal((30, 3)), np.arange(30) % 3


def read_elsewhere(path: Path, folder: Path) -> None:
    """Predict with a pickled classifier in a process that has not imported mine.py; one of a folder of its own."""
    os.chdir(folder)
    assert "mine" not in sys.modules
    classifier, X, expected = joblib.load(path)
    np.testing.assert_array_equal(classifier.predict_proba(X), expected)
    (folder / "plugins").write_text(str(classifier.plugins))


@pytest.fixture
def hub(fresh):
    """A folder with a network of mine.py, which this process has not imported."""
    plugins.load("mine.py")
    mine = sys.modules["mine"]
    config = mine.DoubledConfig(embed_dim=16, col_num_blocks=1, row_num_blocks=1, icl_num_blocks=1, col_num_inducing=4)
    TabICLClassifier(mine.Doubled(config), n_estimators=1).fit(X, y).export("hub")
    forget_plugins()
    return fresh / "hub"


def ring_stream() -> StepStream:
    config = compose([*SMOKE, "prior=ring"])
    return StepStream(configured_prior(config.prior), config.curriculum, config.model, config.seed, range(3))


def change(folder) -> None:
    (folder / "mine.py").write_text(SOURCE + "\n")


def test_an_estimator_takes_its_plug_ins_to_other_processes_and_refuses_another_file(hub, fresh, tmp_path):
    line = r"hub needs the plug-in mine \(network doubled\); add .* in Python plugins=\['mine.py'\]"
    with pytest.raises(ConfigError, match=line):
        TabICLClassifier("hub").fit(X, y)
    classifier = TabICLClassifier(str(hub), n_estimators=1, plugins=["./mine.py"])
    unfitted = pickle.dumps(clone(classifier))
    assert classifier.get_params()["plugins"] == ["./mine.py"]
    assert "mine" not in sys.modules
    expected = classifier.fit(X, y).predict_proba(X)
    joblib.dump((classifier, X, expected), "both.joblib")
    assert wait_for_exit_code(start_process(read_elsewhere, fresh / "both.joblib", tmp_path)) == 0
    assert (tmp_path / "plugins").read_text() == f"['{fresh}/mine.py']"

    forget_plugins()
    copy = pickle.loads(unfitted)
    assert "mine" in sys.modules
    assert np.array_equal(copy.fit(X, y).predict_proba(X), expected)
    assert 'plugins=["mine.py"]' in (hub / "README.md").read_text()
    assert load_network(hub, plugins="mine.py")
    change(fresh)
    joblib.load("both.joblib")  # the module is here as it was
    with pytest.raises(ConfigError, match=r"mine.py has changed since it was imported; start Python anew"):
        copy.fit(X, y)
    forget_plugins()
    with pytest.raises(ConfigError, match=r"mine.py has changed since this object was pickled"):
        joblib.load("both.joblib")
    (fresh / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"which is not there; before, call tabicl_train.plugins.load"):
        joblib.load("both.joblib")


@pytest.mark.slow
def test_folds_are_predicted_in_processes(hub):
    classifier = TabICLClassifier(str(hub), n_estimators=1, plugins=["./mine.py"])
    in_processes = cross_val_score(classifier, X, y, cv=2, n_jobs=2)
    assert "mine" not in sys.modules
    assert in_processes.tolist() == cross_val_score(classifier, X, y, cv=2).tolist()


@pytest.mark.slow
def test_a_spawned_worker_imports_plug_ins_and_refuses_a_changed_file(fresh, monkeypatch):
    stream = ring_stream()
    expected = stream.draw(0).packs[0]
    monkeypatch.setattr(workers, "CONTEXT", get_context("spawn"))
    with Loader(stream, StreamConfig(num_workers=1)) as loader:
        loader.start()
        assert torch.equal(loader.next().packs[0].X, expected.X)

    sent = pickle.dumps(Steps(stream, None))
    forget_plugins()
    change(fresh)
    monkeypatch.setattr(workers, "get_worker_info", lambda: mock.Mock(id=0))
    ((error, _),) = pickle.loads(sent)
    assert isinstance(error, ConfigError)
    assert "mine.py has changed since" in str(error)


def test_an_actor_on_another_machine_gets_the_file_and_what_it_imports(fresh, monkeypatch):
    (fresh / "folder").mkdir()
    (fresh / "folder/helper.py").write_text("FACTOR = 3\n")
    source = SOURCE.replace("> self.radius", "> helper.FACTOR / 3 * self.radius")
    (fresh / "mine.py").write_text(f"from folder import helper\n{source}")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with monkeypatch.context() as here:
        here.syspath_prepend(fresh)
        stream = ring_stream()
    expected, pickled, sent = stream.draw(1), pickle.dumps(stream), plugins.sent()
    ((plugin, content),) = sent
    assert plugin.files == ("mine.py", "folder/helper.py")
    forget_plugins()
    for name in ("folder", "folder.helper"):
        monkeypatch.delitem(sys.modules, name)
    for name in plugin.files:
        (fresh / name).unlink()
    threads = torch.get_num_threads()
    for changed in ([content[0] + b"\n", content[1]], [content[0], b"FACTOR = 4\n"]):
        with pytest.raises(ConfigError, match=r"mine.py is not what was sent"):
            Drawer([(plugin, changed)], pickled, str(fresh))
    _, packs = Drawer(sent, pickled, str(fresh)).draw(1)
    torch.set_num_threads(threads)
    assert np.array_equal(packs[0][0], expected.packs[0].X.numpy())


def test_runs_of_a_sweep_and_jobs_get_absolute_paths_with_hashes(fresh, monkeypatch):
    start, submit = mock.Mock(), mock.Mock()
    monkeypatch.setattr(jobs, "LocalProcess", start)
    monkeypatch.setattr("tabicl_train.training.distributed.submit.submit_job", submit)
    submit.return_value.paths.stdout = fresh / "log"
    plan = make_plan([*SMOKE, "prior=ring", "prior.radius=1.1,1.2"])
    (argument,) = plugins.arguments()
    assert argument.startswith(f"plugins=[{fresh}/mine.py#")
    assert f"'plugins=[{fresh}/mine.py]'" in plan.text()
    jobs.submit_run(plan, ["seed=0"], fresh / "run", "", 1)
    assert argument in start.call_args.args[0]
    assert command("submit", *SMOKE, "prior=ring", "run_dir=job").returncode == 0
    assert argument in submit.call_args.args[0]
    change(fresh)
    with pytest.raises(ConfigError, match=r"mine.py has changed since the command that started this process"):
        jobs.submit_run(plan, ["seed=0"], fresh / "run", "", 1)


def test_a_sweep_goes_on_with_another_file_only_if_a_resume_may(fresh, capsys):
    settings = [*SMOKE, "prior=ring", "prior.radius=1.1,1.2", "run_dir=sweep"]
    (fresh / "sweep").mkdir()
    open_study(make_plan(settings))
    forget_plugins()
    change(fresh)
    with pytest.raises(
        ConfigError, match=r"another sweep .the hash of the plug-in mine was .* resume.allow_changes=true"
    ):
        open_study(make_plan(settings))
    open_study(make_plan([*settings, "resume.allow_changes=true"]))
    assert "finished runs keep their results, all others go on with the file as it is now" in capsys.readouterr().err
    open_study(make_plan(settings))  # which is now the one that it was


@pytest.mark.parametrize(("state", "reason"), [("np.float64(1.5)", "it holds numpy"), ("lambda: 0", "lambda")])
def test_a_state_that_no_resume_could_load_ends_the_run_at_the_first_save(state, reason, fresh):
    returned = "return {'lowest': " + state + "}"
    source = SOURCE.replace('return {"lowest": self.lowest}', returned)
    (fresh / "mine.py").write_text(source.replace("import math\n", "import math\nimport numpy as np\n"))
    settings = ["+callbacks.lowest_loss={}", "checkpoint.every=1", "trainer.max_steps=2"]
    line = (
        f"the state of the callback lowest_loss cannot be loaded from a checkpoint .*{reason}.*state_dict must return"
    )
    with pytest.raises(ConfigError, match=line):
        train_short_run(fresh / "run", *settings, "prior=dummy", settings=SMOKE)
    assert not list((fresh / "run/checkpoints").glob("*"))


def test_a_resume_refuses_another_plug_in_except_of_callbacks_which_it_warns_of(fresh):
    settings = [*SMOKE, "+callbacks.lowest_loss={}", "prior=dummy", "run_dir=run"]
    assert command("train", *settings, "trainer.max_steps=1").returncode == 0
    forget_plugins()
    change(fresh)
    resumed = command("train", *settings, "trainer.max_steps=2")
    assert resumed.returncode == 0
    assert "warning   the hash of the callbacks of mine was " in resumed.stderr
    (record,) = last_checkpoint(fresh / "run")["run"]["plugins"]
    values = last_checkpoint(fresh / "run")["config"]
    with pytest.raises(ConfigError, match=r"has model.gone=1, which the plug-in mine as it is now does not have"):
        network_config(fresh, {"family": "doubled", "gone": 1})
    torch_file = fresh / "run/checkpoints/step-00000002.ckpt"
    for kind in ("network", "scaling", "objective", "optimizer"):
        needed = record | {"uses": [[kind, "mine"]]}
        content = torch.load(torch_file, weights_only=True)
        content["run"]["plugins"] = [needed]
        torch.save(content, torch_file)
        other = [needed | {"sha256": "0" * 64}]
        with pytest.raises(ConfigError, match=r"the hash of the plug-in mine was .* or set resume.allow_changes=true"):
            find_checkpoint(values, None, other)
        find_checkpoint(values | {"resume": {"allow_changes": True}}, None, other)


def test_stored_tables_name_no_folder_and_are_kept_for_the_same_plug_in_only(fresh):
    option = '    radius: float = 1.0\n    """Radius."""\n    place: str = ""\n    """A file."""\n'
    source = SOURCE.replace('    radius: float = 1.0\n    """Radius."""\n', option)
    (fresh / "mine.py").write_text(source)
    dump = ["dump", "experiment=smoke", "plugins=mine.py", "prior=ring", "output=tables", "steps=10"]
    written = command("prior", *dump, f"prior.place='{fresh}/a.csv'")
    assert written.returncode == 0, written.stderr
    metadata = read_contents(str(fresh / "tables/steps-00000000.h5")).attributes
    assert str(fresh) not in str(metadata)
    assert '"place": "a.csv"' in metadata["options"]
    assert metadata["name"] == "ring"
    kept = command("prior", *dump, "prior.place='/elsewhere/a.csv'")
    assert "1 file kept" in kept.stdout, kept.stderr
    forget_plugins()
    (fresh / "mine.py").write_text(source + "\n")
    refused = command("prior", *dump, "prior.place='/elsewhere/a.csv'")
    assert refused.returncode == 2
    assert "belongs to another dump: its plug-in mine is " in refused.stderr


def test_a_rank_with_another_file_than_rank_0_is_refused(fresh, monkeypatch):
    def from_first(self, function):
        value = function()
        return (*value[:2], []) if isinstance(value, tuple) and len(value) == 3 else value

    monkeypatch.setattr(Ranks, "from_first", from_first)
    with pytest.raises(ConfigError, match="the plug-in mine is another one than on rank 0"):
        train_short_run(fresh / "run", "prior=ring", "trainer.max_steps=1", settings=SMOKE)
