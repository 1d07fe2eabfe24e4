"""The sizes of tables that a network was trained on, and what lies inside."""

from dataclasses import asdict

import numpy as np
import pytest
import yaml
from table_files import build_frame, write_table_files
from tiers import slow_except

from priors import Largest
from priors.dummy import Dummy
from tabicl_train.config.compose import CONFIG_DIR, Composer, compose
from tabicl_train.config.schema import OWN, SYNTHETIC, RunConfig, StageConfig, ValidationConfig, configured_prior
from tabicl_train.stream.curriculum import largest_tables
from tabicl_train.training.callbacks.scores import suite_tasks
from tabicl_train.weights.pretrained import (
    TrainedRange,
    is_trained_range,
    position,
    range_of_stages,
    recorded_range,
    trained_range,
)
from tabicl_train.weights.reader import read_weights


def test_all_sizes_of_a_task_must_lie_inside():
    trained = TrainedRange((18, 180), (2, 12), classes=3)
    sizes = {"labeled_rows": 105, "features": 4, "classes": 3}
    assert position(trained, sizes) == "inside"
    assert position(None, sizes) == "unknown"
    for other in ({"labeled_rows": 181}, {"labeled_rows": 17}, {"features": 13}, {"features": 1}, {"classes": 4}):
        assert position(trained, sizes | other) == "outside"
    numbers = {"labeled_rows": 105, "features": 4}
    assert position(TrainedRange((18, 180), (2, 12)), numbers) == "inside"


def test_two_networks_have_the_sizes_in_common_that_both_have_seen():
    common = TrainedRange((18, 180), (2, 12), classes=3).common(TrainedRange((100, 900), (1, 30), classes=10))
    assert common == TrainedRange((100, 180), (2, 12), classes=3)


def test_the_public_data_sets_inside_depend_on_classes_features_and_rows():
    def inside(*settings: str) -> list[str]:
        config = compose(["experiment=demo", *settings])
        trained = trained_range({"config": asdict(config), "global_step": config.total_steps})
        tasks = suite_tasks(("sklearn",), config.model.is_regression)
        return [task.name for task in tasks if position(trained, task.sizes) == "inside"]

    stages = "curriculum.stages"
    assert inside() == ["iris", "wine", "breast_cancer"]  # digits has 64 features
    assert inside(f"{stages}.long.features=[2,64]") == ["iris", "wine", "breast_cancer", "digits"]
    assert inside(f"{stages}.long.features=[2,64]", "model.max_classes=3") == ["iris", "wine", "breast_cancer"]
    assert inside(f"{stages}.long.features=[2,64]", "model.max_classes=2") == ["breast_cancer"]
    # of 200 rows, 140 are labeled; of iris 105
    assert inside(f"{stages}.long.rows=[64,100]", f"{stages}.short.rows=[60,120]") == ["iris"]


def test_what_weights_have_seen_before_a_run_belongs_to_its_range():
    mini = read_weights("mini")
    stage = asdict(StageConfig(steps=10, rows=[60, 400], features=[2, 12]))  # as in own_tables
    config = {"model": asdict(mini.config), "prior": {"name": "mlp_scm"}, "curriculum": {"stages": {"own": stage}}}
    content = {"config": config, "global_step": 5}
    assert not trained_range(content).holds(100, 13)
    content["inherited_range"] = mini.trained_range.recorded(mini.config.max_classes)
    assert trained_range(content).holds(100, 13)
    assert trained_range(content) == mini.trained_range
    assert trained_range(content | {"global_step": 0}) == mini.trained_range
    wider = config | {"curriculum": {"stages": {"own": stage | {"features": [40, 50]}}}}
    assert trained_range(content | {"config": wider}).features == (2, 50)
    assert trained_range(content | {"config": wider, "global_step": 0}).features == (2, 30)  # nothing was seen of it


def content_of(config: RunConfig) -> dict:
    """What the range of a run at its end depends on."""
    prior = configured_prior(config.prior)
    return {
        "config": asdict(config),
        "global_step": config.total_steps,
        "largest_tables": largest_tables(config.curriculum, prior, config.model.is_regression),
    }


def test_a_table_of_ten_columns_teaches_no_hundred_features(tmp_path):
    build_frame(0, 400).to_csv(tmp_path / "own.csv", index=False)
    content = content_of(compose(["experiment=fine_tune", "init_weights=mini", f"prior.file={tmp_path}/own.csv"]))
    training = content["largest_tables"]["fine_tune"]["rows"]
    assert 250 < training < 400
    assert trained_range(content) == TrainedRange((round(0.8 * training),) * 2, (7, 7), classes=2)

    mini = read_weights("mini")
    inherited = {"inherited_range": mini.trained_range.recorded(mini.config.max_classes)}
    assert trained_range(content | inherited) == mini.trained_range
    digits = {"labeled_rows": 140, "features": 64, "classes": 10}
    assert position(trained_range(content | inherited), digits) == "outside"


def test_limits_of_a_prior_are_kept_as_plain_numbers():
    class OfNumPy(Dummy):
        def largest(self, rows: int, numeric: bool) -> Largest:
            return Largest(features=np.int64(5))

    limits = largest_tables(compose(["experiment=smoke"]).curriculum, OfNumPy(), False)
    assert limits == {"smoke": {"features": 5}} and type(limits["smoke"]["features"]) is int


def test_files_hold_fewer_classes_than_those_of_the_network():
    for trained in (
        TrainedRange((18, 180), (2, 12), classes=10),
        TrainedRange((18, 180), (2, 12), classes=3),
        TrainedRange((18, 180), (2, 12)),
    ):
        max_classes = 10 if trained.classes else 0
        recorded = trained.recorded(max_classes)
        assert is_trained_range(recorded)
        assert recorded_range(recorded, max_classes) == trained
    assert TrainedRange((18, 180), (2, 12), classes=10).recorded(10).keys() == {"labeled_rows", "features"}
    for wrong in ({"classes": 3.0}, {"classes": None}, {"rows": [1, 2]}):
        assert not is_trained_range({"labeled_rows": [18, 180], "features": [2, 12]} | wrong)


def test_a_mixture_with_synthetic_tables_has_the_range_of_its_stages(tmp_path):
    folder = write_table_files(tmp_path / "tables", 8)
    settings = [
        "experiment=own_tables",
        f"prior.components.tables.folder={folder}",
        "curriculum.stages.own.rows=[60,140]",
    ]
    settings += [f"prior.components.tables.{side}_fraction=0.25" for side in ("validation", "test")]
    assert trained_range(content_of(compose(settings))).features == (2, 12)
    alone = trained_range(content_of(compose([*settings, "curriculum.stages.own.mix={tables:1}"])))
    assert alone.features == (2, 7)


def test_features_beyond_the_cap_of_all_rows_of_a_stage_are_outside():
    def features(*settings: str) -> tuple[int, int]:
        stage = "curriculum.stages.smoke"
        config = compose(["experiment=smoke", *(f"{stage}.{each}" for each in settings)])
        return trained_range(content_of(config)).features

    assert features("features=[2,100]", "rows=[20000,50000]") == (2, 80)
    assert features("features=[70,100]", "rows=[60001,60001]") == (15, 15)
    assert features("features=[2,100]", "rows=[1000,50000]") == (2, 100)


# The recipes that have been run say it themselves, so that another default does not change what their names mean.
SAY_IT = {
    "mini": SYNTHETIC, "medium": SYNTHETIC, "mini_regression": SYNTHETIC, "base": SYNTHETIC, "card": SYNTHETIC,
    "own_tables": OWN, "fine_tune": OWN,
}  # fmt: skip


def test_recipes_keep_the_score_that_decides_their_best_weights():
    for name, best in SAY_IT.items():
        assert yaml.safe_load((CONFIG_DIR / f"experiment/{name}.yaml").read_text())["validation"]["best"] == best
    sweep = yaml.safe_load((CONFIG_DIR / "sweep/prior_mixtures.yaml").read_text())
    assert "validation.best=real" in sweep["settings"]  # which has no synthetic validation tables
    assert ValidationConfig().best == SYNTHETIC


# Composing a recipe takes 0.1 CPU seconds; two of them are tested by default.
RECIPES = sorted({*Composer().choices["experiment"]} - {"own_tables", "fine_tune"})


@pytest.mark.parametrize("experiment", slow_except(RECIPES, ("demo", "card")))
def test_the_best_weights_of_a_recipe_are_chosen_by_tables_inside_its_range(experiment):
    config = compose([f"experiment={experiment}"])
    settings = config.validation
    trained = trained_range({"config": asdict(config), "global_step": config.total_steps})
    sets = [asdict(StageConfig(rows=[rows, rows], features=settings.features)) for rows in settings.rows]
    inside = [trained.overlaps(range_of_stages([one], config.model.max_classes)) for one in sets]
    assert settings.every == 0 or (settings.best == SYNTHETIC and sum(inside) > 1)
