"""The sizes of tables that a network was trained on, and what lies inside."""

from dataclasses import asdict

import pytest
import yaml

from tabicl_train.callbacks.scores import name_of, real_tasks, sizes_of
from tabicl_train.config.compose import CONFIG_DIR, Composer, compose
from tabicl_train.config.schema import OWN, SYNTHETIC, StageConfig, ValidationConfig
from tabicl_train.prediction.export import read_weights
from tabicl_train.prediction.origin import TrainedRange, position, range_of_stages, trained_range


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
        tasks = real_tasks(config.model.is_regression, config.validation.real_rows)
        return [name_of(task) for task in tasks if position(trained, sizes_of(task)) == "inside"]

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
    content = {"config": {"model": asdict(mini.config), "curriculum": {"stages": {"own": stage}}}, "global_step": 5}
    assert not trained_range(content).holds(100, 13)
    content["inherited_range"] = mini.trained_range.recorded()
    assert trained_range(content).holds(100, 13)
    assert trained_range(content) == mini.trained_range
    assert trained_range(content | {"global_step": 0}) == mini.trained_range
    wider = content["config"] | {"curriculum": {"stages": {"own": stage | {"features": [40, 50]}}}}
    assert trained_range(content | {"config": wider}).features == (2, 50)
    assert trained_range(content | {"config": wider, "global_step": 0}).features == (2, 30)  # nothing was seen of it


# The recipes that have been run say it themselves, so that another default does not change what their names mean.
SAY_IT = {
    "mini": SYNTHETIC, "medium": SYNTHETIC, "mini_regression": SYNTHETIC, "base": SYNTHETIC,
    "own_tables": OWN, "fine_tune": OWN,
}  # fmt: skip


def test_recipes_keep_the_score_that_decides_their_best_weights():
    for name, best in SAY_IT.items():
        assert yaml.safe_load((CONFIG_DIR / f"experiment/{name}.yaml").read_text())["validation"]["best"] == best
    sweep = yaml.safe_load((CONFIG_DIR / "sweep/prior_mixtures.yaml").read_text())
    assert "validation.best=real" in sweep["settings"]  # which has no synthetic validation tables
    assert ValidationConfig().best == SYNTHETIC


@pytest.mark.parametrize("experiment", sorted({*Composer().choices["experiment"]} - {"own_tables", "fine_tune"}))
def test_the_best_weights_of_a_recipe_are_chosen_by_tables_inside_its_range(experiment):
    config = compose([f"experiment={experiment}"])
    settings = config.validation
    trained = trained_range({"config": asdict(config), "global_step": config.total_steps})
    sets = [asdict(StageConfig(rows=[rows, rows], features=settings.features)) for rows in settings.rows]
    inside = [trained.overlaps(range_of_stages([one], config.model.max_classes)) for one in sets]
    assert settings.every == 0 or (settings.best == SYNTHETIC and sum(inside) > 1)
