import dataclasses
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from command_line import command
from table_files import write_table_files
from tiers import slow_except

from priors import PriorError, TableSpec, build_prior
from priors.random import STREAM_VERSION
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior, flatten
from tabicl_train.errors import ConfigError
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.training.callbacks.validation import final_test_streams, validation_streams
from tabicl_train.training.planning import eligible_tables, mixture_lines
from tabicl_train.training.resume import refuse_changes

SPEC = TableSpec(60, 30, 3, 2)


def component(table) -> str:
    """The name of the prior that drew the table, from its plan."""
    return str(table.plan).split()[0].rstrip(",")


def test_shares_are_the_weights():
    mix = build_prior(
        "mix_scm", components={"tree_scm": {"weight": 1}, "dummy": {"weight": 3.0}, "mlp_scm": {"weight": 0}}
    )
    drawn = [component(mix.sample(SPEC, i)) for i in range(300)]
    assert set(drawn) == {"dummy", "tree_scm"}
    assert drawn.count("dummy") / 300 == pytest.approx(0.75, abs=0.07)


@pytest.mark.parametrize("mix", [{"dummy": 1.0}, {"dummy": 1.0, "mlp_scm": 3.0}])
def test_a_mix_replaces_the_weights(mix):
    components = {"tree_scm": {"weight": 1}, "dummy": {"weight": 3.0}, "mlp_scm": {"weight": 0}}
    prior = build_prior("mix_scm", components=components)
    spec = dataclasses.replace(SPEC, mix=tuple(mix.items()))
    drawn = [prior.sample(spec, i) for i in range(150)]
    assert Counter(table.source[0] for table in drawn).keys() == mix.keys()
    for name, share in mix.items():
        assert [component(table) for table in drawn].count(name) / 150 == pytest.approx(
            share / sum(mix.values()), abs=0.1
        )
    mixed, plain = prior.mixed(mix), prior.mixed({})
    assert plain is prior
    assert mixed.shares == {name: mix.get(name, 0) / sum(mix.values()) for name in sorted(components)}
    for seed in range(20):  # the same draws as of a mixture with these weights
        assert torch.equal(mixed.sample(SPEC, seed).X, drawn[seed].X)


def test_tables_of_a_group_come_from_one_component():
    mix = build_prior("mix_scm", components={"dummy": {"weight": 1}, "tree_scm": {"weight": 1}})
    groups = [
        {component(mix.sample(dataclasses.replace(SPEC, group_seed=(5, group)), (group, i))) for i in range(4)}
        for group in range(30)
    ]
    assert all(len(group) == 1 for group in groups)
    assert set().union(*groups) == {"dummy", "tree_scm"}
    assert component(mix.sample(dataclasses.replace(SPEC, group_seed=7), 1)) == component(
        mix.sample(dataclasses.replace(SPEC, group_seed=(7,)), 2)
    )


def test_a_table_is_the_components_own_table_at_that_address():
    options = {"preset": "released", "filter_unpredictable_tables": False}
    mix = build_prior("mix_scm", components={"graph_scm": {"weight": 1, **options}})
    alone = build_prior("graph_scm", **options)
    for seed in range(5):
        mixed, own = mix.sample(SPEC, seed), alone.sample(SPEC, seed)
        assert torch.equal(mixed.X, own.X)
        assert torch.equal(mixed.y, own.y)
        assert mixed.rejections == own.rejections


def test_the_order_of_the_components_does_not_matter():
    components = {"dummy": {"weight": 1}, "tree_scm": {"weight": 1}, "mlp_scm": {"weight": 1}}
    one, other = (
        build_prior("mix_scm", components=dict(items)) for items in (components.items(), reversed(components.items()))
    )
    other = pickle.loads(pickle.dumps(other))  # as it travels to worker processes
    for seed in range(12):
        assert torch.equal(one.sample(SPEC, seed).X, other.sample(SPEC, seed).X)


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "components is empty; name at least one, {mlp_scm: {weight: 1}, ...}"),
        ({"dummy": {"weight": 0}}, "components: at least one needs a positive weight"),
        ({"dummy": 3}, "components.dummy: it must be a mapping, such as {name: 1}"),
        ({"dummy": {}}, "components.dummy.weight is None; it must be a number, 0 or more"),
        ({"dummy": {"weight": -1}}, "components.dummy.weight is -1"),
        ({"dummy": {"weight": "much"}}, "components.dummy.weight is much"),
        ({"dmumy": {"weight": 1}}, "components.dmumy: there is no prior 'dmumy'; did you mean 'dummy'?"),
        ({"mix_scm": {"weight": 1}}, "components.mix_scm: a mixture cannot be part of a mixture"),
        (
            {"graph_scm": {"weight": 1, "preste": "x"}},
            "components.graph_scm.preste: no such setting; did you mean components.graph_scm.preset?",
        ),
        ({"graph_scm": {"weight": 1, "preset": "x"}}, "components.graph_scm.preset is 'x'"),
    ],
)
def test_wrong_components_are_reported(components, message):
    with pytest.raises(PriorError) as caught:
        build_prior("mix_scm", components=components)
    assert message in str(caught.value)


def configured(*overrides: str):
    return configured_prior(compose(["experiment=smoke", "prior=mix_scm", *overrides]).prior)


STAGE = "curriculum.stages.smoke"


def test_a_stage_has_shares_of_its_own():
    later = ["+curriculum.stages.later.steps=5", "+curriculum.stages.later.mix.tree_scm=1"]
    overrides = [f"{STAGE}.mix={{tree_scm:1,mlp_scm:3}}", f"{STAGE}.steps=5", *later]
    config = compose(["experiment=smoke", "prior=mix_scm", *overrides])
    plain = compose(["experiment=smoke", "prior=mix_scm", f"{STAGE}.steps=10"])
    for step in range(10):
        expected = (("tree_scm", 1.0),) if step >= 5 else (("mlp_scm", 3.0), ("tree_scm", 1.0))
        plan = plan_step(config.curriculum, config.model, 0, step)
        assert {group.spec.mix for group in plan.groups} == {expected}
        if step < 5:  # nothing else about the tables changes
            specs = [dataclasses.replace(group.spec, mix=()) for group in plan.groups]
            assert specs == [group.spec for group in plan_step(plain.curriculum, plain.model, 0, step).groups]


def refused(override: str) -> str:
    """Everything that is wrong with a mixture with this setting."""
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", "prior=mix_scm", override])
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("{tree_smc:1}", "'tree_smc' is not a component of the mixture; did you mean 'tree_scm'?"),
        ("{dummy:1}", "'dummy' is not a component of the mixture; there are: mlp_scm, tree_scm"),
        (
            "{tree_scm:-1,nope:1}",
            "the share of tree_scm is -1.0; it must be a number, 0 or more; 'nope' is not a component",
        ),
        ("{tree_scm:0}", "mix is {'tree_scm': 0.0}; at least one share must be positive"),
        ("[1]", "it must be a mapping, such as {name: 1}"),
        ("{tree_scm:much}", "mix.tree_scm is 'much'; it must be of type float"),
    ],
)
def test_wrong_shares_are_reported(mix, message):
    problems = refused(f"{STAGE}.mix={mix}")
    assert f"{STAGE}.mix" in problems and message in problems
    with pytest.raises(ConfigError, match=r"mix is {'mlp_scm': 1.0}; only mixtures have shares \(prior=mix_scm\)"):
        compose(["experiment=smoke", "prior=mlp_scm", f"{STAGE}.mix={{mlp_scm:1}}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prior.components.mlp_scm.wieght=1", "did you mean prior.components.mlp_scm.weight?"),
        (
            "+prior.components.mlp_scm.causl=1",
            "mlp_scm.causl: no such setting; did you mean prior.components.mlp_scm.causal?",
        ),
        ("+prior.components.tables.folder=none", "prior.components.tables.folder is 'none'; there is no such folder"),
    ],
)
def test_wrong_overrides_are_reported(override, message):
    assert message in refused(override)


def test_a_stage_without_real_tables_needs_no_long_one(tmp_path):
    folder = write_table_files(tmp_path / "tables", 2)
    real = ["+prior.components.tables.weight=1", f"+prior.components.tables.folder={folder}"]
    real += ["+prior.components.tables.validation_fraction=0", f"{STAGE}.rows=[40,500]"]
    with pytest.raises(ConfigError, match=r"smoke.rows asks for tables of 500 rows; none of the 2 real tables"):
        compose(["experiment=smoke", "prior=mix_scm", *real])
    config = compose(["experiment=smoke", "prior=mix_scm", *real, f"{STAGE}.mix={{mlp_scm:1}}"])
    assert eligible_tables(config.curriculum, configured_prior(config.prior), False) == []


@pytest.mark.parametrize("name", ["tables", "one_table"])
def test_real_tables_that_only_a_stage_draws_are_validated(tmp_path, name):
    folder = write_table_files(tmp_path / "tables", 8)
    place = f"file={folder}/table0.csv" if name == "one_table" else f"folder={folder}"
    real = [f"+prior.components.{name}.weight=0", f"+prior.components.{name}.{place}", "validation.every=5"]
    real += ["validation.rows=[60]", "validation.best=own"]
    if name == "tables":
        real += [f"+prior.components.tables.{name}_fraction=0.25" for name in ("validation", "test")]
    with pytest.raises(ConfigError, match=r"best is 'own', but all tables of the prior are synthetic"):
        compose(["experiment=smoke", "prior=mix_scm", *real])
    real += [f"{STAGE}.mix={{{name}:3,mlp_scm:1}}"]
    config = compose(["experiment=smoke", "prior=mix_scm", *real])
    parts = config.curriculum.priors_by_kind(configured_prior(config.prior))
    given = config.validation, parts, config.model
    for streams in (validation_streams(*given), final_test_streams(*given)):
        assert sorted(streams) == ["own", "synthetic"]
        assert list(streams["own"].prior.priors) == [name]
        assert streams["synthetic"].prior.shares == pytest.approx({"mlp_scm": 0.7, "tree_scm": 0.3})
    if name == "tables":
        with pytest.raises(ConfigError, match="none is left for validation"):
            compose(["experiment=smoke", "prior=mix_scm", *real, "prior.components.tables.validation_fraction=0"])


def test_only_real_components_limit_the_largest_tables(tmp_path):
    folder = write_table_files(tmp_path / "tables", 2)
    components = {
        "tables": {"weight": 1, "folder": str(folder), "validation_fraction": 0.0, "test_fraction": 0.0},
        "one_table": {"weight": 1, "file": f"{folder}/table0.csv", "drop": ["x"]},
        "mlp_scm": {"weight": 0},
    }
    mix = build_prior("mix_scm", components=components)
    assert mix.largest(60, False).features == 7
    assert mix.largest(60, False).rows is None  # tables has as many as asked for
    assert mix.mixed({"one_table": 1}).largest(60, False) == mix.priors["one_table"].largest(60, False)
    assert mix.mixed({"one_table": 3, "mlp_scm": 1}).largest(60, False) == (None, None, None)


def test_the_shares_of_a_stage_may_change_until_it_starts():
    def config(first: str, later: str):
        stages = [f"{STAGE}.steps=5", f"{STAGE}.mix={first}", "+curriculum.stages.later.steps=5"]
        return compose(["experiment=smoke", "prior=mix_scm", *stages, f"+curriculum.stages.later.mix={later}"])

    saved = dataclasses.asdict(config("{mlp_scm:1}", "{}"))
    content = {"config": saved, "run": {"stream_version": STREAM_VERSION}, "global_step": 3}
    refuse_changes(content, dataclasses.asdict(config("{mlp_scm:1}", "{tree_scm:1}")))
    for changed, steps in ((config("{tree_scm:1}", "{}"), 3), (config("{mlp_scm:1}", "{tree_scm:1}"), 6)):
        with pytest.raises(ConfigError, match=r"stages\.\w+\.mix\.tree_scm was not set, is 1\.0"):
            refuse_changes(content | {"global_step": steps}, dataclasses.asdict(changed))
    assert flatten(saved)["curriculum.stages.smoke.mix.mlp_scm"] == 1.0


def test_components_are_set_by_overrides():
    assert configured().components == {"mlp_scm": {"weight": 0.7}, "tree_scm": {"weight": 0.3}}
    mix = configured(
        "+prior.components.dummy.weight=1",
        "prior.components.mlp_scm.weight=0",
        "+prior.components.graph_scm.weight=2",
        "+prior.components.graph_scm.preset=released",
        "~prior.components.tree_scm",
    )
    assert mix.components == {
        "mlp_scm": {"weight": 0},
        "dummy": {"weight": 1},
        "graph_scm": {"weight": 2, "preset": "released"},
    }
    assert {component(mix.sample(SPEC, i)) for i in range(20)} == {"dummy", "graph_scm"}
    assert np.isclose(sum(options["weight"] for options in configured().components.values()), 1)


CAUSAL = {"graph_scm": 0.25, "mlp_scm": 0.6, "tree_scm": 0.15}
MINI = {"graph_scm": 0.35, "mlp_scm": 0.5, "tree_scm": 0.15}
BASE = {"graph_scm": 0.6, "mlp_scm": 0.3, "tree_scm": 0.1}
V1 = {"mlp_scm": 0.7, "tree_scm": 0.3}
PUBLISHED_SHARES = {  # of all presets that are mixtures, as their published runs had them
    "prior=mix_scm": V1,
    "prior=mix_scm_causal": CAUSAL,
    "prior=demo": CAUSAL,
    "prior=demo_regression": CAUSAL,
    "prior=mini": MINI,
    "prior=mini_regression": MINI,
    "prior=base": BASE,
    "experiment=demo": CAUSAL,
    "experiment=demo_long": CAUSAL,
    "experiment=demo_regression": CAUSAL,
    "experiment=mini": MINI,
    "experiment=mini_regression": MINI,
    "experiment=base": BASE,
    "experiment=tabicl_v1": V1,
    "experiment=own_tables": {"graph_scm": 0.125, "mlp_scm": 0.3, "tables": 0.5, "tree_scm": 0.075},
}


def composed(choice: str):
    """The configuration of a preset, also of one that needs a folder of tables."""
    try:
        return compose([choice])
    except ConfigError as error:
        return error.config


# Composing a recipe takes 0.1 CPU seconds; three of them are tested by default.
@pytest.mark.parametrize("choice", slow_except(PUBLISHED_SHARES, ("prior=demo", "prior=mini", "prior=base")))
def test_presets_keep_their_shares(choice):
    components = composed(choice).prior["components"]
    weights = {name: options["weight"] for name, options in components.items()}
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    assert shares == pytest.approx(PUBLISHED_SHARES[choice])
    assert components["mlp_scm"].get("causal", False) == ("graph_scm" in components)


def test_components_and_shares_given_as_a_whole_replace_the_mixture():
    both = "{graph_scm:{weight:0.7},dummy:{weight:0.3}}"
    assert configured(f"prior.components={both}").shares == pytest.approx({"graph_scm": 0.7, "dummy": 0.3})
    changed = configured(f"prior.components={both}", "prior.components.dummy.weight=0.7")
    assert changed.shares == {"dummy": 0.5, "graph_scm": 0.5}
    added = configured("+prior.components={graph_scm:{weight:1}}")
    assert added.shares == {"graph_scm": 0.5, "mlp_scm": 0.35, "tree_scm": 0.15}
    shares = [f"{STAGE}.mix={{mlp_scm:1}}", f"{STAGE}.mix={{tree_scm:1}}"]
    stage = compose(["experiment=smoke", "prior=mix_scm", *shares]).curriculum.stages["smoke"]
    assert stage.mix == {"tree_scm": 1.0}


def test_a_file_has_exactly_the_components_that_it_lists(tmp_path):
    (tmp_path / "prior").mkdir()
    listed = "components: {graph_scm: {weight: 0.7}, dummy: {weight: 0.3}}\n"
    (tmp_path / "prior/new.yaml").write_text("defaults: [schema/mix_scm]\n" + listed)
    (tmp_path / "prior/inherits.yaml").write_text("defaults: [mix_scm, _self_]\n" + listed)
    (tmp_path / "prior/empty.yaml").write_text("defaults: [schema/mix_scm]\n")

    def components(name: str) -> set[str]:
        return set(compose(["experiment=smoke", f"prior={name}"], str(tmp_path)).prior["components"])

    assert components("new") == {"graph_scm", "dummy"}
    assert components("inherits") == {"graph_scm", "dummy", "mlp_scm", "tree_scm"}
    with pytest.raises(ConfigError, match="components is empty; name at least one"):
        components("empty")
    assert build_prior("mix_scm").shares == {"mlp_scm": 0.7, "tree_scm": 0.3}


def test_the_plan_names_the_shares_of_all_components():
    stages = [f"{STAGE}.steps=5", "+curriculum.stages.later.steps=5", "+curriculum.stages.later.mix={tree_scm:1}"]
    result = command("train", "experiment=smoke", "prior=mix_scm", *stages, "--cfg", "job")
    lines = [line for line in result.stderr.splitlines() if "tree_scm" in line]
    assert lines == ["mixture   mlp_scm 70 %, tree_scm 30 %", "          stage later: tree_scm 100 %, mlp_scm 0 %"]
    validated = ["validation.every=5", "validation.rows=[60]"]
    shares = mixture_lines(compose(["experiment=smoke", "prior=mix_scm", *stages, *validated]))
    assert shares == [*lines, "          synthetic tables of validation: mlp_scm 70 %, tree_scm 30 %"]
    assert mixture_lines(compose(["experiment=smoke", "prior=mix_scm", *validated])) == lines[:1]


def checkpoint_of(prior: dict, config) -> dict:
    saved = dataclasses.asdict(config) | {"prior": prior}
    return {"config": saved, "run": {"stream_version": STREAM_VERSION}, "global_step": 3}


@pytest.mark.parametrize(
    "choice", ["prior=mix_scm", "prior=mix_scm_causal", "prior=mini", "prior=base", "experiment=own_tables"]
)
def test_a_run_of_a_preset_is_resumed_as_before(choice, capsys):
    config = composed(choice)
    # as checkpoints keep them: components in another order, and without options that are newer than they are
    components = dict(sorted(config.prior["components"].items(), reverse=True))
    prior = {"components": components, "realism": {"missing": 0.0}, "name": "mix_scm"}
    if config.prior["min_skill"]:
        prior["min_skill"] = config.prior["min_skill"]
    refuse_changes(checkpoint_of(prior, config), dataclasses.asdict(config))
    assert capsys.readouterr().err == ""


def test_a_run_is_not_resumed_with_more_components():
    two = compose(["experiment=smoke", "prior=mix_scm", "prior.components={tree_scm:{weight:1},dummy:{weight:1}}"])
    three = compose(["experiment=smoke", "prior=mix_scm", "+prior.components={dummy:{weight:1}}"])
    with pytest.raises(ConfigError, match=r"prior.components.mlp_scm.weight was not set, is 0\.7"):
        refuse_changes(checkpoint_of(two.prior, two), dataclasses.asdict(three))
    without = {"name": "mix_scm"}  # with the default components
    refuse_changes(checkpoint_of(without, two), dataclasses.asdict(compose(["experiment=smoke", "prior=mix_scm"])))
