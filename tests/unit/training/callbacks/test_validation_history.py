"""What the rows of validation.csv say: the best weights, and whether the run ends."""

import math

import pytest

from tabicl_train.config.schema import ValidationConfig
from tabicl_train.training.callbacks.validation_history import is_improvement, read_history

LOSSES = [1.0, 0.8, 0.9, 0.8, 0.85, 0.7, 0.6, 0.5]  # of steps 1 to 8: 3 without a better one end with step 5
NAN = math.nan


def rows(losses: list[float], guess_loss: float = 1.6) -> list[dict[str, str]]:
    """Those of a run that keeps each better loss."""
    found, best = [], math.inf
    for step, loss in enumerate(losses, 1):
        row = {"step": step, "data": "own", "rows": 40, "loss": loss, "roc_auc": "", "guess_loss": guess_loss}
        found.append({key: str(value) for key, value in (row | {"is_best": int(loss < best)}).items()})
        best = loss if loss < best else best
    return found


@pytest.mark.parametrize(
    ("losses", "ends", "best_step"),
    [
        (LOSSES, 5, 8), ([1.0, 1.0, 1.0, 1.0], 4, 1), ([1.0, NAN, NAN, NAN], 4, 1), ([NAN, 2.0, 1.0, 1.5], None, 3),
        ([3.0, 2.0, 1.0, 0.5], None, 4), ([NAN], None, None), ([], None, None),
        ([1.0, 1.5, 0.9, 1.5, 1.5], None, 3),  # the better third one starts the count anew
    ],
)  # fmt: skip
def test_the_end_and_the_best_step_follow_from_the_rows_up_to_a_step(losses, ends, best_step):
    settings, written = ValidationConfig(every=1, best="own", patience=3), rows(losses)
    ended = [step for step in range(1, len(losses) + 1) if read_history(written, settings, step).ended]
    assert ended[:1] == ([] if ends is None else [ends])  # later rows, of steps that are computed again, do not count
    assert read_history(written, settings).best_step == best_step
    assert read_history(written, ValidationConfig(every=1, best="own")).ended is None


def test_only_scores_on_the_same_tables_are_compared():
    settings = ValidationConfig(every=1, best="own", patience=2)
    (best,), (worse,), (better,) = rows([0.5]), rows([0.6]), rows([0.4])
    assert is_improvement([better], [best], settings)
    assert not is_improvement([worse], [best], settings)
    assert is_improvement([worse], [], settings)
    assert not is_improvement(rows([NAN]), [], settings)
    assert is_improvement(rows([0.6], guess_loss=1.5), [best], settings)  # other tables of the same size

    # other tables do not count as steps without an improvement
    changed = [row | {"step": str(step)} for step, row in enumerate(rows([0.9, 0.9, 0.8, 0.9], guess_loss=1.5), 2)]
    for step in range(1, 6):
        assert read_history([best, *changed], settings, step).ended is None


def test_real_tables_are_compared_by_roc_auc_alone():
    settings = ValidationConfig(every=1, best="real")
    (best,), (worse,), (better,) = rows([0.5]), rows([0.4]), rows([0.6])
    for row in (best, worse, better):
        row |= {"data": "iris", "roc_auc": row["loss"], "guess_loss": ""}
    assert is_improvement([better], [best], settings)
    assert not is_improvement([worse], [best], settings)

    (synthetic,) = rows([1.0], 1.5)
    (other_synthetic,) = rows([1.0], 1.6)
    synthetic["data"] = other_synthetic["data"] = "synthetic"  # it does not decide
    assert not is_improvement([worse, synthetic], [best, other_synthetic], settings)
