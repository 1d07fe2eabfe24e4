"""Folders for the Hugging Face Hub: written whole or not at all, read back or refused, and what their card says."""

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from networks import TINY, tiny_network
from safetensors import safe_open
from training_runs import write_untrained_run

from priors.random import STREAM_VERSION
from tabicl_train.errors import ConfigError
from tabicl_train.run.records import Records
from tabicl_train.weights.export import export, save_public
from tabicl_train.weights.hub_format import model_card
from tabicl_train.weights.reader import read_weights

huggingface_hub = pytest.importorskip("huggingface_hub")

FILES = {"README.md", "config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A run and its export."""
    folder = tmp_path_factory.mktemp("made")
    write_untrained_run(folder / "run")
    export(str(folder / "run"), str(folder / "hub"))
    return folder / "run", folder / "hub"


@pytest.fixture
def run_dir(made, tmp_path) -> Path:
    return shutil.copytree(made[0], tmp_path / "run")


@pytest.fixture
def hub(made, tmp_path) -> Path:
    return shutil.copytree(made[1], tmp_path / "hub")


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_its_files_say_where_the_weights_are_from(run_dir, tmp_path):
    export(str(run_dir), str(tmp_path / "hub"), weights="ema")
    assert set(files(tmp_path / "hub")) == FILES
    with safe_open(tmp_path / "hub" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {"run": "run", "step": "10", "weights": "ema", "commit": "c0ffee with uncommitted changes"}
    assert metadata == expected | {
        "format": "pt",
        "trained_range": "12 to 72 labeled rows, 2 to 6 features, up to 10 classes",
    }
    description = json.loads((tmp_path / "hub" / "config.json").read_text(), parse_constant=pytest.fail)
    assert description["library_name"] == "tabicl-train"
    assert description["model"]["embed_dim"] == 16
    assert description["origin"]["config"]["curriculum"]["stages"]["smoke"]["steps"] == 20
    assert str(tmp_path) not in json.dumps(description)  # a folder of this machine


def test_an_empty_folder_and_a_link_to_a_folder_are_written_to(run_dir, hub, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("hub")
    for name in ("empty", "link"):
        export(str(run_dir), str(tmp_path / name), weights="best")
        assert read_weights(tmp_path / name).origin["weights"] == "best"
    assert (tmp_path / "link").is_symlink()
    assert read_weights(hub).origin["weights"] == "best"


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


def test_a_run_is_not_replaced(run_dir):
    with pytest.raises(ConfigError, match=r"also holds checkpoints and 2 more, which would be lost"):
        export(str(run_dir), str(run_dir))


@pytest.mark.parametrize(("exists", "failing"), [(True, 2), (False, 1)])
def test_a_full_disk_leaves_everything_as_it_was(exists, failing, run_dir, hub, tmp_path, monkeypatch):
    before, output = files(hub), hub if exists else tmp_path / "other"
    opened = []

    def open_file(path, mode):
        opened.append(path)
        return io.FileIO("/dev/full", mode) if len(opened) == failing + 1 else open(path, mode)

    monkeypatch.setattr("tabicl_train.outputs.open", open_file, raising=False)
    with pytest.raises(ConfigError) as caught:
        export(str(run_dir), str(output), weights="ema")
    assert caught.value.problems == [f"output is '{output}'; it cannot be written (No space left on device)"]
    assert files(hub) == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hub"}


@pytest.mark.parametrize("name", sorted(FILES - {"README.md"}))
def test_a_folder_without_one_of_its_files_is_refused(name, hub):
    (hub / name).unlink()
    with pytest.raises(ConfigError, match=rf"hub has no {name}; it is incomplete"):
        read_weights(str(hub))


def test_weights_of_another_export_and_damaged_ones_are_refused(run_dir, hub, tmp_path):
    export(str(run_dir), str(tmp_path / "other"), weights="ema")
    weights = hub / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[-1] ^= 1
    for content in ((tmp_path / "other/model.safetensors").read_bytes(), bytes(whole)):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is damaged, or does not belong to the config\.json"):
            read_weights(str(hub))
    (hub / "README.md").unlink()  # which is not needed to load
    weights.write_bytes(whole[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        read_weights(str(hub))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"library_name": "transformers"}, r"config\.json was not written by tabicl-export"),
        ({"format_version": 2}, "was written by "),
        ({"model": {"new": 1}}, r"has model\.new=1, which this version of tabicl-train does not have"),
        ({"model": {"col_scaling": "mine"}}, "col_scaling is 'mine'; it must be one of none, "),
        ({"model": {"embed_dim": 32}}, "has shape|are missing|do not belong"),
        ({"model": [1]}, r"config\.json was not written by tabicl-export"),
        (
            {"model": {"embed_dim": "16", "dropout": None}},
            r"it must be of type int\n.*model\.dropout: it needs a value",
        ),
        ({"model": {"col_scaling": [1]}}, r"config\.json: model\.col_scaling is \[1\]; it must be of type str"),
        ({"model": {"family": [1]}}, r"config\.json: there is no network '\[1\]'"),
        ({"sha256": [1]}, r"is damaged, or does not belong to the config\.json"),
        ({"origin": [1]}, r"config\.json: its origin is not a dictionary"),
        ({"origin": {"step": "3"}}, r"config\.json: origin\.step is '3', which no export writes"),
        ({"origin": {"trained_range": {"features": 3}}}, r"config\.json: origin\.trained_range is {.features.: 3}"),
    ],
)
def test_a_foreign_or_later_description_is_refused(change, words, hub):
    description = json.loads((hub / "config.json").read_text())
    if isinstance(change.get("model"), dict):
        change = {"model": description["model"] | change["model"]}
    (hub / "config.json").write_text(json.dumps(description | change))
    with pytest.raises(ConfigError, match=words):
        read_weights(str(hub))
    for text in ("{", "[1, 2]"):
        (hub / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="was not written by tabicl-export"):
            read_weights(str(hub))


def test_a_card_that_lacks_information_is_not_written(hub, tmp_path):
    description = json.loads((hub / "config.json").read_text())
    del description["origin"]["versions"]
    (hub / "config.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"lacks what the model card needs .*'versions'"):
        export(str(hub), str(tmp_path / "other"))
    export(str(hub), str(tmp_path / "other.safetensors"))


def test_a_file_in_the_folder_is_no_checkpoint(hub):
    with pytest.raises(ConfigError, match=rf"has no configuration; if it is in a hub folder, name the folder, '{hub}'"):
        read_weights(str(hub / "model.safetensors"))
    with pytest.raises(ConfigError, match="holds one set of weights; weights=best needs a run directory"):
        read_weights(str(hub), "best")


def exported_card(source, folder, weights="trained"):
    export(str(source), str(folder), weights)
    return huggingface_hub.ModelCard.load(folder / "README.md")


def scores(method: str, data: str, split: int, roc_auc: float, position: str = "inside") -> dict:
    scores = {"roc_auc": roc_auc, "log_loss": 0.5, "accuracy": 0.75}
    return {"data": data, "split": split, "method": method, **scores, "trained_range": position}


def test_it_tells_recipe_data_scores_and_limits(tmp_path):
    later = "+curriculum.stages.later.steps=7"
    write_untrained_run(tmp_path / "run", "prior=mlp_scm_causal", "init_weights=null", later, "trainer.max_steps=20")
    Records(tmp_path / "run").append_rows(
        "evaluation.csv",
        scores("this model", "digits", 0, 0.5, "outside"),
        scores("this model", "iris", 0, 0.9),
        scores("this model", "iris", 1, 0.7),
        scores("this model", "wine", 0, 0.6),
        scores("random forest", "iris", 0, 0.95),
    )
    read = exported_card(tmp_path / "run", tmp_path / "m")
    assert read.data.license == "bsd-3-clause"
    assert read.data.library_name == "tabicl-train"
    assert read.data.pipeline_tag == "tabular-classification"
    assert "synthetic-data" in read.data.tags
    assert read.data.eval_results is None  # the scores do not say of which weights they are
    card = read.content
    for line in (
        "# m\n",
        "| run | run |",
        "| weights | as trained, after step 10 of 20 |",
        "| commit | c0ffee with uncommitted changes |",
        "| seed | 0 |",
        "| optimizer | muon |",
        "| command | `tabicl-train seed=0` |",  # without the folder, which is one of this machine
        "| smoke | 10 of 20 | 8 | 40 to 80 | 0.3 to 0.9 | 2 to 6 | 0.001, cosine |",
        "All training tables were drawn from the prior `mlp_scm` "
        f"(version {STREAM_VERSION} of the stream of tables) with these",
        "| `causal` | `True` |",
        "After step 10, on validation tables of the prior",
        "| synthetic | 64 | 1.2500 | 0.5000 |  |",
        "| iris | 60 | 1.5000 | 0.5000 | 0.6250 |",
        "| inside | this model | 2 | 0.7000 | 0.5000 | 0.7500 |",  # the mean of 0.8 and 0.6: tasks have equal weight
        "| inside | random forest | 1 | 0.9500 | 0.5000 | 0.7500 |",
        "| outside | this model | 1 | 0.5000 | 0.5000 | 0.7500 |",
        "- Trained on tables with 12 to 72 labeled rows, 2 to 6 features, up to 10 classes. Outside this range",
        "| torch | 2.13.0 |",
    ):
        assert f"\n{line}" in card, line
    assert str(tmp_path) not in card
    assert "started from" not in card
    assert "| later |" not in card


def test_it_tells_the_mixtures_of_the_stages_and_what_was_minimized(tmp_path):
    stage = "curriculum.stages.smoke"
    mix = [f"{stage}.steps=6", f"{stage}.mix={{tree_scm:3,mlp_scm:1}}", "+curriculum.stages.later.steps=14"]
    write_untrained_run(tmp_path / "run", "prior=mix_scm", *mix, "objective=cross_entropy")
    pretrained = read_weights(tmp_path / "run", "trained")
    pretrained.origin["config"]["auxiliary_losses"] = {"load_balance": 0.01}
    card = model_card("m", pretrained)
    for line in (
        "| objective | `cross_entropy` with label_smoothing=0.0, class_weights=none |",
        "| auxiliary losses | `load_balance` 0.01 |",
        "| stage | steps | tables per step | rows | labeled share | features | learning rate | mixture |",
        "| smoke | 6 | 8 | 40 to 80 | 0.3 to 0.9 | 2 to 6 | 0.001, cosine | `tree_scm` 3, `mlp_scm` 1 |",
        "with these options, but with the mixtures of the stages above in place of the weights of `components`:",
    ):
        assert line in card, line
    assert "0.0008, cosine | the weights of the components |" in card

    write_untrained_run(tmp_path / "plain", "prior=mix_scm", "+curriculum.stages.later.mix={mlp_scm:1}")
    plain = model_card("m", read_weights(tmp_path / "plain", "trained"))  # its stage with a mixture has not begun
    assert not re.search(r"\| mixture|the mixtures|objective|auxiliary losses", plain)
    assert "with these options:" in plain


def test_scores_outside_the_trained_range_are_marked(tmp_path):
    write_untrained_run(tmp_path / "run")
    path = tmp_path / "run/validation.csv"
    validation = pd.read_csv(path)
    validation.assign(trained_range=["outside" if data == "iris" else "" for data in validation["data"]]).to_csv(
        path, index=False
    )
    card = exported_card(tmp_path / "run", tmp_path / "m").content
    assert "| data | rows | loss | accuracy | roc_auc | trained_range |" in card
    assert "| iris | 60 | 1.5000 | 0.5000 | 0.6250 | outside |" in card


def test_scores_of_other_weights_are_not_passed_off_as_theirs(tmp_path, monkeypatch):
    write_untrained_run(tmp_path / "run")
    best = exported_card(tmp_path / "run", tmp_path / "best", "best").content
    assert "after step 5 of 20" in best
    assert "After step 5, on validation" in best
    assert "| 0.3125 |" in best
    monkeypatch.chdir(tmp_path / "run/checkpoints")  # a checkpoint is in its run whatever its path looks like
    assert exported_card("best.ckpt", tmp_path / "inside").content == best.replace("# best\n", "# inside\n", 1).replace(
        "the best by validation", "as trained"
    )
    ema = exported_card(tmp_path / "run", tmp_path / "ema", "ema").content
    assert "After step 10, for the weights as trained rather than these, on validation" in ema


def test_the_card_of_a_regressor_says_so(tmp_path):
    write_untrained_run(tmp_path / "run", "task=regression", "model.num_quantiles=99")
    weights = read_weights(tmp_path / "run", "trained").name

    def numbers(method: str, data: str, split: int, r2: float, pinball: float | None) -> dict:
        found = {"r2": r2, "rmse": 0.5, "pinball": pinball, "coverage": pinball}
        scored = weights if method == "this model" else "-"
        members = 8.0 if method == "this model" else None
        of_network = {"trained_range": "inside", "n_estimators": members, "weights": scored}
        return {"data": data, "split": split, "method": method, **found, **of_network}

    Records(tmp_path / "run").append_rows(
        "evaluation.csv",
        numbers("this model", "diabetes", 0, 0.6, 0.3),
        numbers("this model", "diabetes", 1, 0.2, 0.1),
        numbers("this model", "houses", 0, -5.0, 0.4),
        numbers("ridge regression", "diabetes", 0, 0.5, None),
    )
    name = "m: 'a' \"b\" # {c} & <d>"  # with characters that have a meaning in YAML and HTML
    card = exported_card(tmp_path / "run", tmp_path / name)
    assert card.data.model_name == name and f"\n# {name}\n" in card.content
    assert card.data.pipeline_tag == "tabular-regression"
    assert "tabular-classification" not in card.data.tags
    for line in (
        "A TabICL-style tabular foundation model for regression.",
        "regressor = TabICLRegressor(folder).fit(X, y)\n",
        "- Regression only.\n- Quantiles at levels from 0.01 to 0.99;",
        "| data | rows | loss | crps | rmse | r2 | coverage |",
        "`coverage` is that of 80% intervals.",
        "| trained_range | method | tasks | r2 | pinball | coverage | n_estimators | weights |",
        f"| inside | this model | 2 | 0.2000 | 0.3000 | 0.3000 | 8 | {weights} |",  # of 0.4 and 0
        "| inside | ridge regression | 1 | 0.5000 |  |  |  | - |",
    ):
        assert line in card.content, line
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("r2", 0.2, "2 real tasks")
    other = exported_card(tmp_path / "run", tmp_path / "other", "ema")
    assert other.data.eval_results is None and weights in other.content
    assert "lassifi" not in card.content.replace("tabular-classification", "")


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_its_code_runs(task, tmp_path, monkeypatch):
    write_untrained_run(tmp_path / "run", f"task={task}")
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
    assert headings == ["# m", "## Use", "## Limits"]
    assert "Trained on" not in card
    assert "output=model.ckpt` writes a file for the `tabicl` package" in card
    write_untrained_run(tmp_path / "bounded", "model.scaling_bound=5")
    card = exported_card(tmp_path / "bounded", tmp_path / "b").content
    assert "The `tabicl` package cannot express this network, which has model.scaling_bound (5.0)." in card
    assert "output=model.ckpt" not in card
