"""Which metrics of which runs cannot be compared, and which settings that is due to."""

import pytest
from table_files import write_table_files

from tabicl_train.config.compose import compose
from tabicl_train.sweep.comparable import incomparable

VALIDATED = ("experiment=smoke", "validation.every=5", "validation.rows=[64]")
ON_REAL_TABLES = ("experiment=smoke", "validation.every=5", "validation.rows=[]", "validation.best=real")
CROSS_ENTROPY = (*VALIDATED, "objective=cross_entropy")
MIXTURE = (*VALIDATED, "prior=mix_scm")
REGRESSION = (*VALIDATED, "task=regression", "validation.suites=[]")
TWO_STAGES = ("experiment=smoke", "+curriculum.stages.long.steps=980")
SMOKE = "curriculum.stages.smoke"
OTHER_PRIOR = {"tables": ["prior"]}
OTHER_WEIGHT = {"tables": ["prior.components.mlp_scm.weight"]}
OTHER_ROWS = {"tables": ["the trained range"]}
OTHER_QUANTILES = {"objectives": ["model.num_quantiles"]}


@pytest.mark.parametrize(
    ("shared", "one", "other", "expected"),
    [
        (VALIDATED, [f"{SMOKE}.learning_rate=1e-3"], ["model.icl_scaling=none", f"{SMOKE}.steps=9"], {}),
        (
            CROSS_ENTROPY,
            ["objective.label_smoothing=0"],
            ["objective.label_smoothing=0.2"],
            {"loss": {"objectives": ["objective.label_smoothing"]}},
        ),
        (VALIDATED, [], ["objective=cross_entropy"], {"loss": {"objectives": ["objective"]}}),
        (VALIDATED, [], ["model.dropout=0.1"], {"loss": {"objectives": ["model.dropout"]}}),
        (ON_REAL_TABLES, ["prior=mlp_scm"], ["prior=graph_scm"], {"loss": OTHER_PRIOR}),
        (
            VALIDATED,
            ["prior=mlp_scm"],
            ["prior=graph_scm", "+auxiliary_losses.balance=0.1"],
            {
                "loss": {"objectives": ["auxiliary_losses.balance"], **OTHER_PRIOR},
                "synthetic/loss": OTHER_PRIOR,
                "synthetic/accuracy": OTHER_PRIOR,
            },
        ),
        (
            MIXTURE,
            [],
            ["prior.components.mlp_scm.weight=3"],
            {"loss": OTHER_WEIGHT, "synthetic/loss": OTHER_WEIGHT, "synthetic/accuracy": OTHER_WEIGHT},
        ),
        (
            (*VALIDATED, "validation.rows=[64,512]"),  # of which only those inside the trained range count
            [f"{SMOKE}.rows=[50,80]"],
            [f"{SMOKE}.rows=[400,600]"],
            {"loss": {"tables": [f"{SMOKE}.rows"]}, "synthetic/loss": OTHER_ROWS, "synthetic/accuracy": OTHER_ROWS},
        ),
        (
            REGRESSION,
            ["model.num_quantiles=9"],
            ["model.num_quantiles=99"],
            {"loss": OTHER_QUANTILES, "synthetic/loss": OTHER_QUANTILES},
        ),
        (TWO_STAGES, [], [f"{SMOKE}.features=[2,4]"], {}),  # which ends before the last tenth of the steps
        (
            (*TWO_STAGES, "trainer.max_steps=20"),
            [],
            [f"{SMOKE}.features=[2,4]"],
            {"loss": {"tables": [f"{SMOKE}.features"]}},
        ),
        (VALIDATED, [], ["validation.suites=[keel]"], {"real/loss": {"tables": ["validation.suites"]}}),
    ],
)
def test_metrics_of_different_objectives_or_tables_name_the_settings_that_differ(shared, one, other, expected):
    found = incomparable([compose([*shared, *settings]) for settings in (one, other)])
    metrics = ("loss", "synthetic/loss", "synthetic/accuracy", "real/loss")
    assert {metric: found[metric] for metric in metrics if metric in found} == expected


def test_scores_of_synthetic_and_of_own_tables_do_not_depend_on_their_shares(tmp_path):
    folder = write_table_files(tmp_path / "tables", 8)
    tables = [f"+prior.components.tables.folder={folder}", "validation.rows=[60]", "validation.best=own"]
    tables += [f"+prior.components.tables.{name}_fraction=0.25" for name in ("validation", "test")]
    mixtures = [compose([*MIXTURE, *tables, f"+prior.components.tables.weight={weight}"]) for weight in (1, 2)]
    assert incomparable(mixtures).keys() == {"loss"}
