"""Runs of transformers over sequences: the same line as for TabICL, from the tables to the export."""

from pathlib import Path

import pytest
import torch
from command_line import command
from training_runs import SHORT_RUN_OF_ANY_FAMILY, assert_same_state, read_metrics, read_rows, train_short_run

from tabicl_train.check.replay import replay
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.report.page import write_report
from tabicl_train.training.callbacks.validation import validation_streams
from tabicl_train.weights.export import export
from tabicl_train.weights.reader import load_model, load_network

STAGE = "curriculum.stages.smoke."
TASKS = {
    "linear_functions": ("model.max_classes=0", "model.scaling=ssa_trainable", "guard.loss=inf"),
    "quantifiers": ("model.ff_factor=0",),
}
VALIDATED = (
    "validation.every=8", "validation.rows=[12]", "validation.tables=5", "validation.features=[1,1]",
    "validation.suites=[]", "validation.best=synthetic",
)  # fmt: skip


def settings(task: str) -> list[str]:
    return ["model=sequence_tiny", f"prior={task}", f"{STAGE}rows=[10,20]", f"{STAGE}features=[1,1]", *TASKS[task]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A validated run of eight steps of each task."""
    folder = tmp_path_factory.mktemp("runs")
    for task in TASKS:
        changes = (*settings(task), *VALIDATED, "trainer.max_steps=8")
        train_short_run(folder / task, *changes, settings=SHORT_RUN_OF_ANY_FAMILY)
    return folder


def test_validation_scores_are_those_of_their_definitions(folder):
    for task in TASKS:
        row = read_rows(folder / task / "validation.csv")[-1]
        config = compose(["experiment=smoke", *settings(task), *VALIDATED])
        streams = validation_streams(config.validation, {"synthetic": configured_prior(config.prior)}, config.model)
        network, (item,) = load_network(str(folder / task)), list(streams["synthetic"])
        losses, hits, squares = [], [], []
        spreads = [y.double().var(correction=0) for pack in item.packs for _, y, _ in pack.tables()]
        with torch.no_grad():
            for pack in item.packs:
                predictions = network(pack)
                losses.append(network.losses(predictions, pack))
                hits.append((predictions.argmax(1) == pack.y).double())
                squares.append((predictions[:, 0] - pack.y).double().square())
        assert float(row["loss"]) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
        if task == "quantifiers":
            assert float(row["accuracy"]) == pytest.approx(torch.cat(hits).mean().item())
        else:
            error = torch.cat(squares).mean().item()
            assert float(row["rmse"]) == pytest.approx(error**0.5, rel=1e-5)
            assert row["crps"] == row["coverage"] == ""
            assert float(row["r2"]) == pytest.approx(1 - error / torch.stack(spreads).mean().item(), rel=1e-4)


def test_an_export_is_the_network_and_other_formats_refuse_it(folder, tmp_path):
    source = str(folder / "linear_functions")
    assert "load_network" in export(source, str(tmp_path / "hub"))
    network = load_network(str(tmp_path / "hub"))
    assert isinstance(network, SequenceModel)
    assert network.config == load_network(source).config
    assert_same_state(dict(network.state_dict()), dict(load_network(source).state_dict()))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "load_network" in card
    assert "TabICL" not in card
    assert "`linear_functions`" in card
    for output, words in (
        ("a.ckpt", "public format has no networks over sequences"),
        ("a.onnx", "SequenceModel has its own"),
    ):
        with pytest.raises(ConfigError, match=words):
            export(source, str(tmp_path / output))
    with pytest.raises(ConfigError, match="of the family sequence, which predicts no real tables"):
        load_model(source)


@pytest.mark.slow  # draws figures
@pytest.mark.usefixtures("unrendered")
def test_reports_replays_and_plans_need_no_family(folder, tmp_path, capsys):
    write_report([folder / task for task in TASKS], tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()
    replay(str(folder / "linear_functions"), 6)
    row = read_metrics(folder / "linear_functions")[6]
    assert f"loss {float(row['loss']):.6g}, gradient norm {float(row['grad_norm']):.4g}" in capsys.readouterr().out
    result = command("train", "experiment=smoke", *settings("quantifiers"), "--cfg", "job")
    assert result.returncode == 0 and "family: sequence" in result.stdout


def test_a_run_of_one_family_neither_continues_nor_starts_from_the_other(folder, tmp_path):
    with pytest.raises(ConfigError, match="the file's model is of family sequence; this run trains tabicl"):
        train_short_run(tmp_path / "run", f"init_weights={folder}/quantifiers")
    with pytest.raises(ConfigError, match=r"is another run: model\.family was sequence"):
        train_short_run(folder / "quantifiers")


def test_mistakes_are_told_before_the_run(tmp_path):
    sizes = ["validation.every=8", "validation.features=[1,1]", "validation.rows=[300]", f"{STAGE}rows=[10,300]"]
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", *settings("quantifiers"), *sizes, f"{STAGE}frozen=[icl]"])
    found = caught.value.problems
    words = ("curriculum.stages.smoke.frozen is 'icl'; it must be one of embedding, blocks, head", "rows is [10, 300];")
    assert any(words[0] in problem for problem in found)
    assert any(words[1] in problem for problem in found)
    assert any("validation.rows is [300]; 300 rows of 1 numbers and a label are 600 tokens" in line for line in found)
    assert any("validation.suites is ['sklearn']; it must be [], since" in line for line in found)
    with pytest.raises(ConfigError, match=r"model\.embed_dim: no such setting"):
        compose(["experiment=smoke", *settings("quantifiers"), "model.embed_dim=8"])
    with pytest.raises(ConfigError, match="prior=linear_functions draws numbers only, which needs"):
        compose(["experiment=smoke", "prior=linear_functions"])
