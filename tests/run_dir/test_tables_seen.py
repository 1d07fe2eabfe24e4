"""What a run has drawn of real tables, against the draws themselves."""

from collections import Counter

import own_tables
import pytest
import short_runs
from runs import last, read

from tabicl_train.callbacks import guard
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.tables_seen import FILE, TablesSeen
from tabicl_train.stream import StepStream

ROWS = {f"table{number}.csv": 150 + 50 * number for number in range(3)}
SMOKE = "curriculum.stages.smoke"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return own_tables.write(tmp_path_factory.mktemp("own") / "tables", len(ROWS))


@pytest.fixture
def mixture(folder):
    """tables and dummy, three to one in the first two steps and equally often in the others."""
    parts = (
        "dummy.weight=1",
        "tables.weight=1",
        f"tables.folder={folder}",
        "tables.validation_fraction=0",
        "tables.test_fraction=0",
    )
    return [
        "prior=mix_scm", "prior.components.mlp_scm.weight=0", "prior.components.tree_scm.weight=0",
        *(f"+prior.components.{part}" for part in parts), f"{SMOKE}.steps=2", f"{SMOKE}.mix={{dummy:1,tables:3}}",
        *(f"+curriculum.stages.later.{value}" for value in
          ("steps=14", "rows=[30,50]", "features=[2,4]", "tables=4", "group_size=1", "warmup=0")),
    ]  # fmt: skip


def drawn(config, steps) -> dict[tuple[str, str], list[int]]:
    """Draws and rows by component and table, "" for all of a component."""
    prior, counts = build_prior(config.prior), {}
    for step in steps:
        (item,) = StepStream(prior, config.curriculum, config.model, config.seed, range(step, step + 1))
        for ((component, table), rows), count in item.sources.items():
            for key in {(component, table), (component, "")}:
                before = counts.get(key, [0, 0])
                counts[key] = [before[0] + count, before[1] + count * rows]
    return counts


def stored(run_dir) -> dict[tuple[str, str], list[int]]:
    rows = read(run_dir / FILE)
    for row in rows:
        epochs = float(row["epochs"]) if row["epochs"] else None
        assert epochs == (int(row["rows"]) / ROWS[row["table"]] if row["table"] else None)
    counts = {(row["component"], row["table"]): [int(row["draws"]), int(row["rows"])] for row in rows}
    return {source: count for source, count in counts.items() if count[0]}


def test_items_tell_where_their_tables_come_from(mixture):
    config = compose(["experiment=smoke", *mixture])
    prior, model = build_prior(config.prior), config.model
    for rank in (0, 1):
        for item in StepStream(prior, config.curriculum, model, 0, range(4), rank, 2):
            assert item.sources.total() == sum(map(len, item.packs))
            rows = Counter(rows for (_, rows), count in item.sources.items() for _ in range(count))
            assert rows == Counter(rows for pack in item.packs for rows, _, _ in pack.shapes)
    (plain,) = StepStream(build_prior(compose(["experiment=smoke", "prior=mlp_scm"])), config.curriculum, model, 0, [0])
    assert not plain.sources


def test_counts_of_ranks_add_up_and_are_told(mixture, folder, tmp_path):
    config = compose(["experiment=smoke", *mixture])
    seen = [TablesSeen(config, Records(tmp_path)) for _ in range(2)]
    assert seen[0].line(1) is None
    for rank, counts in enumerate(seen):
        for item in StepStream(build_prior(config.prior), config.curriculum, config.model, 0, range(6), rank, 2):
            counts.add(item.sources)
    assert seen[1].own.sum() > 0
    both = seen[0].own + seen[1].own
    seen[0].merge(lambda _: both)
    seen[0].write()
    expected = drawn(config, range(6))
    assert stored(tmp_path) == expected and seen[0].own.sum() == 0
    real, synthetic = (expected[component, ""][0] for component in ("tables", "dummy"))
    asked = (2 * 8 * 0.75 + 4 * 4 * 0.5) / (2 * 8 + 4 * 4)
    epochs = {table: expected["tables", table][1] / rows for table, rows in ROWS.items()}
    assert seen[0].line(6) == (
        f"{real / (real + synthetic):.0%} real tables (asked for {asked:.0%}), {sorted(epochs.values())[1]:.3g} epochs "
        f"over the median table, {max(epochs.values()):.3g} over the most drawn: {max(epochs, key=epochs.get)}"
    )
    again = TablesSeen(config, Records(tmp_path / "again"))
    again.load(seen[0].text()[:-1] + ', ["tables", "gone.csv", 10, 3, 90]]')
    assert again.entries() == [*seen[0].entries(), ("tables", "gone.csv", 10, 3, 90)]


@pytest.mark.multi_process
def test_an_interrupted_run_tells_what_an_undisturbed_one_tells(mixture, tmp_path, capsys):
    settings = [*mixture, "trainer.max_steps=6", "checkpoint.every=2"]
    assert short_runs.run(tmp_path / "whole", *settings) == "finished"
    line = capsys.readouterr().err.partition("\nseen ")[2].partition("\n")[0]
    assert "real tables (asked for 62%)" in line
    short_runs.run(tmp_path / "torn", *settings, "trainer.max_steps=3")
    (tmp_path / "torn/checkpoints/step-00000003.ckpt").unlink()  # as if the run had been killed
    assert short_runs.run(tmp_path / "torn", *settings) == "finished"
    assert f"\nseen {line}\n" in capsys.readouterr().err
    assert (tmp_path / "torn" / FILE).read_text() == (tmp_path / "whole" / FILE).read_text()
    one, other = (last(tmp_path / name)["callbacks"]["Metrics"]["tables_seen"] for name in ("torn", "whole"))
    assert one == other != "[]"
    assert stored(tmp_path / "whole") == drawn(compose(["experiment=smoke", *mixture]), range(6))


@pytest.mark.slow
def test_a_rewind_takes_back_what_its_steps_have_drawn(mixture, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "HORIZON", 2)
    monkeypatch.setattr(guard, "MEMORY", 0.5)
    settings = [*mixture, f"{SMOKE}.steps=16", *short_runs.REWIND, "trainer.precision=fp16", "trainer.max_steps=13"]
    short_runs.run(tmp_path / "run", *settings, callbacks=(short_runs.Ruin(9),))
    ((good, at),) = last(tmp_path / "run")["callbacks"]["Guard"]["abandoned"]
    steps = [*range(good), *range(at, 13)]
    assert at > good and stored(tmp_path / "run") == drawn(compose(["experiment=smoke", *settings]), steps)


@pytest.mark.multi_process
def test_runs_without_real_tables_tell_nothing(tmp_path, capsys):
    short_runs.run(tmp_path / "run", "prior=mix_scm", "trainer.max_steps=2")
    assert not (tmp_path / "run" / FILE).exists() and last(tmp_path / "run")["callbacks"]["Metrics"] == {}
    assert "seen  " not in capsys.readouterr().err
