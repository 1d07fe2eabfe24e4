"""The tables of validations, and others for the test at the end of a run: none of them is drawn in training."""

from __future__ import annotations

from priors import Prior
from priors.real import real_tables
from tabicl_train.config.schema import CurriculumConfig, StageConfig, ValidationConfig
from tabicl_train.model.family import NetworkConfig
from tabicl_train.stream import StepStream

# In place of a run's seed, which is at least 0: no step has these tables, and all runs share them.
VALIDATION_SEED, TEST_SEED = -1, -2


def validation_streams(
    settings: ValidationConfig, parts: dict[str, Prior], model: NetworkConfig
) -> dict[str, StepStream]:
    """The tables of a validation by the parts of the prior: item k holds those with the k-th number of rows.

    Apart from the validation's own settings they depend on the prior and the number of classes only. A prior of real
    tables draws them from those that training never draws.
    """
    priors = {name: real.for_validation() if (real := real_tables(part)) else part for name, part in parts.items()}
    return {name: stream(settings, prior, model, VALIDATION_SEED) for name, prior in priors.items()}


def final_test_streams(
    settings: ValidationConfig, parts: dict[str, Prior], model: NetworkConfig
) -> dict[str, StepStream]:
    """The same for the test: other tables, and real ones that neither training nor validation draws."""
    priors = {name: real.for_test() if (real := real_tables(part)) else part for name, part in parts.items()}
    return {name: stream(settings, prior, model, TEST_SEED) for name, prior in priors.items()}


def stream(settings: ValidationConfig, prior: Prior, model: NetworkConfig, seed: int) -> StepStream:
    """The tables of a prior, without the numbers of rows that none of its real tables has."""
    real = real_tables(prior)
    counts = {rows: real.eligible(rows, model.is_regression) if real else None for rows in settings.rows}
    eligible = [rows for rows, count in counts.items() if count is None or count[0] > 0]
    stages = {
        f"{k}": StageConfig(steps=1, rows=[n, n], features=list(settings.features), tables=settings.tables)
        for k, n in enumerate(eligible)
    }
    return StepStream(prior, CurriculumConfig(stages), model, seed, range(len(stages)), keeps_clusters=True)
