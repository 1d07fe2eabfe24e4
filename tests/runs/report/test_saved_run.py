"""The run in a folder as an object, and runs that a script starts."""

import threading

import pytest
import torch
from training_runs import SHORT_RUN

from tabicl_train import TabICLClassifier, TabICLRegressor, compose, open_run, train
from tabicl_train.errors import ConfigError
from tabicl_train.run.records import Records

VALIDATE = ("validation.every=8", "validation.rows=[20]", "validation.tables=1", "validation.suites=[]")


class Fail:
    """Ends training by an error after a step."""

    def after_step(self, state, item) -> None:
        if state.step == 10:
            raise RuntimeError("the machine is gone")


def weights_of(network) -> list[torch.Tensor]:
    return list(network.state_dict().values())


def test_a_run_as_an_object_after_a_failure_and_a_resume(tmp_path, capfd):
    folder = tmp_path / "run"
    config = compose([*SHORT_RUN, *VALIDATE, f"run_dir={folder}"])
    with pytest.raises(ConfigError, match="there is no run in it"):
        open_run(folder)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train(config, [Fail()])
    run = open_run(folder)
    assert run.status["status"] == "failed"
    assert run.metrics["step"].tolist() == list(range(1, 10))
    assert run.validation["step"].tolist() == [8]
    assert list(run.checkpoints) == [4, 8]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert train(config) == "finished" and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert run.config == config and run.status["status"] == "finished"
    assert run.metrics["step"].tolist() == list(range(1, 17))
    assert run.metrics["loss"].gt(0).all()
    assert run.validation["step"].tolist() == [8, 16]
    assert [start["step"] for start in run.starts] == [0, 8]
    assert run.evaluation.empty
    assert run.test is None
    assert not run.multipliers.empty
    Records(folder).append_rows("metrics.csv", *run.metrics.iloc[11:13].to_dict("records"))
    assert run.metrics["step"].tolist() == list(range(1, 14))  # as if steps 12 and 13 had been done again

    capfd.readouterr()
    newest, step_12 = run.network("newest"), run.network(12)
    line = capfd.readouterr().err.splitlines()[0]
    assert line == f"weights   {folder}: the newest, of step 16"
    assert not newest.training
    assert not all(torch.equal(a, b) for a, b in zip(weights_of(newest), weights_of(step_12), strict=True))
    with pytest.raises(ConfigError, match="no checkpoint of step 11; there are 8, 12, 16"):
        run.network(11)
    estimator = run.estimator("newest", n_estimators=1)
    assert type(estimator) is TabICLClassifier and estimator.n_estimators == 1
    assert all(torch.equal(a, b) for a, b in zip(weights_of(newest), weights_of(estimator.model), strict=True))


def test_the_estimator_of_a_run_that_predicts_numbers_is_a_regressor(tmp_path):
    config = compose([*SHORT_RUN, "task=regression", "prior=mlp_scm", "trainer.max_steps=1", f"run_dir={tmp_path}/run"])
    results = []
    thread = threading.Thread(target=lambda: results.append(train(config)))  # as in a web service
    thread.start()
    thread.join()
    assert results == ["finished"]
    assert type(open_run(config.run_dir).estimator()) is TabICLRegressor


def test_a_run_whose_plugin_is_not_loaded_says_what_to_add(tmp_path):
    config = compose([*SHORT_RUN, "trainer.max_steps=1", f"run_dir={tmp_path}/run"])
    train(config)
    run = open_run(tmp_path / "run")
    (path,) = run.checkpoints.values()
    content = torch.load(path, weights_only=True)
    needed = {"module": "nobody_has_this", "version": None, "sha256": "0", "files": ["nobody_has_this.py"]}
    content["run"]["plugins"] = [needed | {"uses": [["prior", "spirals"], ["network", "spiral"]]}]
    torch.save(content, path)
    values = Records(run.folder).config()
    values["prior"] = {"name": "spirals"}
    Records(run.folder).replace("config.yaml", str(values))
    for use in (lambda: run.config, run.network, run.estimator):
        with pytest.raises(ConfigError, match=r"needs the plug-in nobody_has_this .*add plugins=\[nobody_"):
            use()
