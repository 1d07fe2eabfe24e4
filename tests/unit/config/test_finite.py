"""Numbers that are not finite: no option takes nan, and only the options whose documentation names it take inf."""

import dataclasses
import re

import pytest
from configurations import problems

import priors
from tabicl_train import register
from tabicl_train.config import options
from tabicl_train.config.compose import Composer, compose, parse_options
from tabicl_train.config.documentation import field_docs
from tabicl_train.config.schema import RunConfig, StageConfig, flatten
from tabicl_train.errors import ConfigError

PARTS = [f.default_factory for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.default_factory)]
FAMILIES = [family.settings for family in register.network.values()]
COMMANDS = [cls for cls in vars(options).values() if dataclasses.is_dataclass(cls)]
PRIORS = [priors.prior_class(name) for name in priors.prior_names()]


def test_inf_is_allowed_exactly_where_the_documentation_names_it():
    declared = set()
    documented = set()
    for cls in {RunConfig, StageConfig, *PARTS, *FAMILIES, *PRIORS, *COMMANDS}:
        docs = field_docs(cls)
        for field in dataclasses.fields(cls):
            if "float" not in str(field.type):
                continue
            if field.metadata.get("inf"):
                declared.add((cls, field.name))
            if re.search(r"\binf\b", docs[field.name]):
                documented.add((cls, field.name))
    assert declared == documented
    assert {name for _, name in declared} >= {"clip", "loss", "multiplier"}


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_every_setting_of_a_run_is_refused_in_one_line(number):
    values = flatten(dataclasses.asdict(compose(["experiment=smoke"])))
    keys = [key for key, value in values.items() if isinstance(value, float) and not key.startswith("prior.")]
    keys += ["trainer.max_hours", "model.scaling_bound"]  # null by default
    if number == "inf":
        for key in ("curriculum.stages.smoke.clip", "guard.loss", "guard.multiplier", "guard.other_multiplier"):
            keys.remove(key)
            compose(["experiment=smoke", f"{key}=inf"])
    lists = ["optimizer.betas", "curriculum.stages.smoke.train_share"]
    settings = [f"{key}={number}" for key in keys] + [f"{key}=[0.5,{number}]" for key in lists]
    settings += [f"curriculum.stages.smoke.mix={{mlp_scm: {number}}}", "prior=mix_scm"]
    found = problems("experiment=smoke", *settings)
    for key in (*keys, *lists, "curriculum.stages.smoke.mix.mlp_scm"):
        (line,) = [line for line in found if line.startswith(f"{key} ")]
        value = f"[0.5, {number}]; each value" if key in lists else f"{number}; it"
        assert line.startswith(f"{key} is {value} must be a ")


def test_the_options_of_a_prior_are_refused():
    sequences = ["experiment=smoke", "model=sequence_tiny", "model.max_classes=0", "prior=linear_functions"]
    assert "prior.sigma is inf; it must be a finite number" in problems(*sequences, "prior.sigma=inf")
    mixture = ["experiment=smoke", "prior=mix_scm"]
    assert "components.mlp_scm.weight is nan" in problems(*mixture, "prior.components.mlp_scm.weight=nan")[0]


def test_the_options_of_commands_and_sweeps_are_refused():
    with pytest.raises(ConfigError, match=r"^hours is inf; it must be a finite number$"):
        parse_options(options.SubmitOptions, ["hours=inf"])
    with pytest.raises(ConfigError, match=r"^coverage is nan; it must be a finite number$"):
        parse_options(options.PredictOptions, ["train=a", "target=b", "test=c", "output=d", "coverage=nan"])
    with pytest.raises(ConfigError, match=r"^sweep\.submit\.hours is inf; it must be a finite number$"):
        Composer().compose_sweep(["sweep.submit.cluster=slurm", "sweep.submit.hours=inf"])
