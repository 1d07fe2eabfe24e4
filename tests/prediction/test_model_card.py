"""What a model card says, and that the Hub reads it."""

import re

import numpy as np
import pytest
from made_run import make_run
from tiny_network import TINY, tiny_network

from priors.random import STREAM_VERSION
from tabicl_train.prediction.export import export
from tabicl_train.prediction.public_format import save_public
from tabicl_train.run_dir.records import Records

huggingface_hub = pytest.importorskip("huggingface_hub")


def exported_card(source, folder, weights="trained"):
    export(str(source), str(folder), weights)
    return huggingface_hub.ModelCard.load(folder / "README.md")


def scores(method: str, data: str, split: int, roc_auc: float, position: str = "inside") -> dict:
    scores = {"roc_auc": roc_auc, "log_loss": 0.5, "accuracy": 0.75}
    return {"data": data, "split": split, "method": method, **scores, "trained_range": position}


def test_the_hub_reads_what_kind_of_model_it_is(tmp_path):
    make_run(tmp_path / "run")
    card = exported_card(tmp_path / "run", tmp_path / "my_model")
    assert card.data.license == "bsd-3-clause" and card.data.library_name == "tabicl-train"
    assert card.data.pipeline_tag == "tabular-classification" and "synthetic-data" in card.data.tags
    assert card.text.startswith("\n# my_model\n")


def test_it_tells_recipe_data_scores_and_limits(tmp_path):
    make_run(tmp_path / "run", "prior=mlp_scm_causal", "init_weights=null")
    Records(tmp_path / "run").append_rows(
        "evaluation.csv",
        scores("this model", "iris", 0, 0.9),
        scores("this model", "iris", 1, 0.7),
        scores("this model", "wine", 0, 0.6),
        scores("random forest", "iris", 0, 0.95),
        scores("this model", "digits", 0, 0.5, "outside"),
    )
    card = exported_card(tmp_path / "run", tmp_path / "m").content
    for line in (
        "| run | run |",
        "| weights | as trained, after step 10 of 20 |",
        "| commit | c0ffee with uncommitted changes |",
        "| seed | 0 |",
        "| optimizer | muon |",
        "| command | `tabicl-train seed=0` |",  # without the folder, which is one of this machine
        "| smoke | 20 | 8 | 40 to 80 | 0.3 to 0.9 | 2 to 6 | 0.001, cosine |",
        "All training tables were drawn from the prior `mlp_scm` "
        f"(version {STREAM_VERSION} of the stream of tables) with these",
        "| `causal` | `True` |",
        "After step 10, on validation tables of the prior",
        "| synthetic | 64 | 1.2500 | 0.5000 |  |",
        "| iris | 60 | 1.5000 | 0.5000 | 0.6250 |",
        "| inside | this model | 2 | 0.7000 | 0.5000 | 0.7500 |",  # the mean of 0.8 and 0.6: tasks have equal weight
        "| inside | random forest | 1 | 0.9500 | 0.5000 | 0.7500 |",
        "| outside | this model | 1 | 0.5000 | 0.5000 | 0.7500 |",
        "- Trained on tables with 12 to 72 labeled rows, 2 to 6 features. Outside this range",
        "| torch | 2.13.0 |",
    ):
        assert f"\n{line}" in card, line
    assert str(tmp_path) not in card and "started from" not in card


def test_scores_of_other_weights_are_not_passed_off_as_theirs(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    best = exported_card(tmp_path / "run", tmp_path / "best", "best").content
    assert "after step 5 of 20" in best and "After step 5, on validation" in best and "| 0.3125 |" in best
    monkeypatch.chdir(tmp_path / "run/checkpoints")  # a checkpoint is in its run whatever its path looks like
    assert exported_card("best.ckpt", tmp_path / "inside").content == best.replace("# best\n", "# inside\n", 1).replace(
        "the best by validation", "as trained"
    )
    ema = exported_card(tmp_path / "run", tmp_path / "ema", "ema").content
    assert "After step 10, of the weights as trained rather than these, on validation" in ema


def test_that_of_a_regressor_says_so(tmp_path):
    make_run(tmp_path / "run", "task=regression", "model.num_quantiles=99")
    card = exported_card(tmp_path / "run", tmp_path / "m")
    assert card.data.pipeline_tag == "tabular-regression" and "tabular-classification" not in card.data.tags
    for line in (
        "A TabICL-style tabular foundation model for regression.",
        "regressor = TabICLRegressor(folder).fit(X, y)\n",
        "- Regression only.\n- Quantiles at levels from 0.01 to 0.99;",
        "| data | rows | loss | crps | rmse | r2 | coverage |",
    ):
        assert line in card.content, line
    assert "lassifi" not in card.content.replace("tabular-classification", "")


def test_it_tells_the_scores_of_a_regressor(tmp_path):
    make_run(tmp_path / "run", "task=regression", "model.num_quantiles=99")

    def numbers(method: str, data: str, split: int, r2: float, pinball: float | None) -> dict:
        found = {"r2": r2, "rmse": 0.5, "pinball": pinball, "coverage": pinball}
        return {"data": data, "split": split, "method": method, **found, "trained_range": "inside"}

    Records(tmp_path / "run").append_rows(
        "evaluation.csv",
        numbers("this model", "diabetes", 0, 0.6, 0.3),
        numbers("this model", "diabetes", 1, 0.2, 0.1),
        numbers("this model", "houses", 0, -5.0, 0.4),
        numbers("ridge regression", "diabetes", 0, 0.5, None),
    )
    card = exported_card(tmp_path / "run", tmp_path / "m").content
    for line in (
        "run. `this model` is the pretrained network. An R2 below 0 counts as 0; `pinball` is in standard "
        "deviations of the target. `coverage` is that of 80% intervals.",
        "| trained_range | method | tasks | r2 | pinball | coverage |",
        "| inside | this model | 2 | 0.2000 | 0.3000 | 0.3000 |",  # of 0.4 and 0
        "| inside | ridge regression | 1 | 0.5000 |  |  |",
    ):
        assert line in card, line


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_its_code_runs(task, tmp_path, monkeypatch):
    make_run(tmp_path / "run", f"task={task}")
    card = exported_card(tmp_path / "run", tmp_path / "m")
    (code,) = re.findall(r"^```python\n(.*?)^```", card.content, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", {"OWNER/NAME": tmp_path / "m"}.__getitem__)
    rng = np.random.default_rng(0)
    names = {"X": rng.normal(size=(20, 3)), "y": np.arange(20) % 3, "queries": rng.normal(size=(5, 3))}
    exec(code, names)
    if task == "regression":
        assert names["means"].shape == (5,)
    else:
        assert names["probabilities"].shape == (5, 3)


def test_it_leaves_out_what_is_not_known(tmp_path):
    save_public(TINY, tiny_network().state_dict(), tmp_path / "released.ckpt")
    card = exported_card(tmp_path / "released.ckpt", tmp_path / "m").content
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings == ["# m", "## Use", "## Limits"] and "Trained on" not in card


def test_it_tells_whether_the_client_can_load_the_network(tmp_path):
    make_run(tmp_path / "free")
    make_run(tmp_path / "bounded", "model.scaling_bound=5")
    make_run(tmp_path / "averaging", "model.icl_scaling=ssa")
    make_run(tmp_path / "gaps", "model.missing_values=true")
    names = ("free", "bounded", "averaging", "gaps")
    free, *others = (exported_card(tmp_path / name, tmp_path / f"hub_{name}").content for name in names)
    assert "output=model.ckpt` writes a file for the `tabicl` package" in free
    settings = ("model.scaling_bound (5.0)", "model.icl_scaling=ssa", "model.missing_values=true")
    for card, setting in zip(others, settings, strict=True):
        assert f"The `tabicl` package cannot express this network, which has {setting}." in card
        assert "output=model.ckpt" not in card


@pytest.mark.parametrize(
    "content", ["a,b\n1,2\n", "trained_range,method,data,roc_auc,log_loss,accuracy\n,,,x,y,z\n", ""]
)
def test_an_evaluation_file_of_another_program_is_left_alone(content, tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "run" / "evaluation.csv").write_text(content)
    assert "## Evaluation" not in exported_card(tmp_path / "run", tmp_path / "m").content
