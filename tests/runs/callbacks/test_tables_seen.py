"""What a run has drawn of real tables, against the draws themselves."""

import statistics
from collections import Counter
from types import SimpleNamespace

import pytest
from table_files import write_table_files
from training_runs import REWIND, Ruin, last_checkpoint, train_short_run

from tabicl_train.callbacks import guard
from tabicl_train.callbacks.tables_seen import TablesSeen
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.stream import StepStream

ROWS = {f"table{number}.csv": 150 + 50 * number for number in range(3)}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> list[str]:
    """Settings of tables and dummy, three to one."""
    folder = write_table_files(tmp_path_factory.mktemp("own") / "tables", len(ROWS))
    parts = (
        "dummy.weight=1",
        "tables.weight=3",
        f"tables.folder={folder}",
        "tables.validation_fraction=0",
        "tables.test_fraction=0",
    )
    return [
        "prior=mix_scm", "prior.components.mlp_scm.weight=0", "prior.components.tree_scm.weight=0",
        *(f"+prior.components.{part}" for part in parts),
    ]  # fmt: skip


def seen_by(config, steps, rank: int = 0, ranks: int = 1) -> TablesSeen:
    prior = configured_prior(config.prior)
    seen = TablesSeen()
    seen.context = SimpleNamespace(prior=prior, ranks=Ranks())
    for step in steps:
        (item,) = StepStream(prior, config.curriculum, config.model, 0, range(step, step + 1), rank, ranks)
        rows = Counter(rows for (_, rows), count in item.sources.items() for _ in range(count))
        assert rows == Counter(rows for pack in item.packs for rows, _, _ in pack.shapes)
        seen.before_step(None, item)
    return seen


def test_counts_of_ranks_add_up_and_are_told(mixture):
    config = compose(["experiment=smoke", *mixture])
    one, other = (seen_by(config, range(6), rank, 2) for rank in (0, 1))
    assert one.line() is None and other.unmerged.sum() > 0
    total = one.unmerged + other.unmerged
    one.context.ranks = SimpleNamespace(sum=lambda _: total)
    whole, state = seen_by(config, range(6)), one.state_dict()
    assert state == whole.state_dict() and one.unmerged.sum() == 0
    counts = list(zip(one.sizes, one.merged.tolist(), strict=True))
    share = sum(draws for (_, table), (draws, _) in counts if table) / (6 * 8)
    epochs = [rows / ROWS[table] for (_, table), (_, rows) in counts if table]
    assert one.merged[:, 0].sum() == 6 * 8 and 0.6 < share < 0.9
    start = (
        f"{share:.0%} real tables, {statistics.median(epochs):.3g} epochs over the median one, {max(epochs):.3g} over"
    )
    assert one.line().startswith(start)
    again = seen_by(config, [])
    again.load_state_dict({"counts": state["counts"][:-1] + ', ["tables", "gone.csv", 3, 90]]'})
    assert again.state_dict() == state


def test_a_stopped_run_with_a_rewind_has_counted_its_steps_once(mixture, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(guard, "HORIZON", 2)
    monkeypatch.setattr(guard, "MEMORY", 0.5)
    settings = [*mixture, *REWIND, "trainer.precision=fp16"]
    train_short_run(tmp_path / "run", *settings, "trainer.max_steps=11", callbacks=(Ruin(9),))
    train_short_run(tmp_path / "run", *settings, "trainer.max_steps=13")
    content = last_checkpoint(tmp_path / "run")["callbacks"]
    ((good, at),) = content["Guard"]["abandoned"]
    assert at > good
    expected = seen_by(compose(["experiment=smoke", *settings]), [*range(good), *range(at, 13)])
    assert content["TablesSeen"] == expected.state_dict()
    assert f"\nseen      {expected.line()}\n" in capsys.readouterr().err
