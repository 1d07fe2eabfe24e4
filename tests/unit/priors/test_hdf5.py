"""Tables in HDF5 files: those that are written, read as others read them, and the prior that reads those of others."""

import itertools
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
from training_runs import train_short_run

from priors import Prior, PriorError, TableSpec, build_prior
from priors.dump import dump_file, dump_folder
from priors.hdf5 import FORMAT
from priors.random import STREAM_VERSION
from tabicl_train import TableStream
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICLConfig
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.stream.steps import StepStream
from tabicl_train.training.checks import missing_steps

PRIOR = build_prior("mlp_scm")
SIZES = ((30, 15), (42, 12))  # rows and labeled rows of the batches, in turn
BATCH = 4


def requests(batches: int, max_classes: int = 3) -> list:
    """Batches of tables of equal rows and splits, with up to five features."""
    found = []
    for batch in range(batches):
        rows, labeled = SIZES[batch % 2]
        for index in range(BATCH):
            spec = TableSpec(rows, labeled, 1 + (batch + index) % 5, max_classes, group_seed=(5, batch, index))
            found.append(((5, batch, index), spec))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """48 tables."""
    path = tmp_path_factory.mktemp("dump") / "tables.h5"
    dump_file(PRIOR, requests(12), path, BATCH, 3)
    return path


def batches_of(path: Path, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Batches as the loaders of nanoTabPFN and TFM-Playground read them."""
    with h5py.File(path) as file:
        assert file["problem_type"][()].decode() in ("classification", "regression")
        assert file["max_num_classes"].shape == (1,)
        assert np.array_equal(file["single_eval_pos"], file["train_test_split_index"])
        for first in range(0, len(file["X"]), size):
            some = slice(first, first + size)
            rows = int(file["num_datapoints"][some].max())
            features = int(file["num_features"][some].max())
            yield file["X"][some, :rows, :features], file["y"][some, :rows], int(file["single_eval_pos"][first])


@pytest.mark.parametrize("size", [BATCH, 2])
def test_loaders_of_others_read_the_tables_that_were_drawn(size, path):
    drawn = iter(requests(12))
    for X, y, labeled in batches_of(path, size):
        assert X.dtype == y.dtype == np.float32
        for columns, labels in zip(X, y, strict=True):
            address, spec = next(drawn)
            table = PRIOR.sample(spec, address)
            M = table.X.shape[1]
            assert np.array_equal(columns[:, :M], table.X)
            assert not columns[:, M:].any()
            assert np.array_equal(labels, table.y)
            assert labeled == table.train_size
    assert next(drawn, None) is None


def test_a_batch_of_tables_that_loaders_would_mix_up_is_refused(tmp_path):
    path = tmp_path / "tables.h5"
    path.write_text("old")
    with pytest.raises(PriorError, match=r"tables 0..7 are one batch, .*\(30 rows, 15 labeled\), but another .* 42"):
        dump_file(PRIOR, requests(2), path, 2 * BATCH, 3)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


CURRICULUM = CurriculumConfig(
    {
        "wide": StageConfig(steps=3, rows=[30, 42], train_share=[0.29, 0.5], features=[1, 5], tables=6, group_size=4),
        "narrow": StageConfig(steps=4, rows=[30, 42], train_share=[0.29, 0.5], features=[1, 5], tables=2),
    }
)


def contents(packs: list) -> list[bytes]:
    """The values of all tables, sorted."""
    return sorted(X.numpy().tobytes() + y.numpy().tobytes() for pack in packs for X, y, _ in pack.tables())


def test_a_run_reads_the_file_in_its_order_whatever_its_seed_and_ranks(path):
    prior = build_prior("hdf5", file=str(path))
    remaining = iter(requests(12))
    for step, tables in enumerate([6, 6, 6, 2, 2, 2, 2]):
        stored = [PRIOR.sample(spec, address) for address, spec in itertools.islice(remaining, tables)]
        expected = sorted(table.X.numpy().tobytes() + table.y.numpy().tobytes() for table in stored)

        packs = StepStream(prior, CURRICULUM, TabICLConfig(), 3, range(7)).draw(step).packs
        assert contents(packs) == expected
        for pack in packs:
            assert {(rows, labeled) for rows, labeled, _ in pack.shapes} <= set(SIZES)
        of_ranks = []
        for rank in (0, 1):
            of_ranks += StepStream(prior, CURRICULUM, TabICLConfig(), 4, range(7), rank, 2).draw(step).packs
        assert contents(of_ranks) == expected


def test_a_stream_ends_with_the_last_pass_of_the_file(path):
    file = {"name": "hdf5", "file": str(path)}
    batches = list(TableStream(file, tables=BATCH, dense=True))
    assert [(batch.X.shape[:2], batch.n) for batch in batches] == [((BATCH, N), n) for N, n in SIZES] * 6
    twice = list(TableStream({**file, "passes": 2}, tables=BATCH, dense=True, start=10))
    assert len(twice) == 14
    for one, other in zip(twice, batches[10:], strict=False):
        assert torch.equal(one.X, other.X) and torch.equal(one.y, other.y)
    assert len(list(TableStream(file, tables=5))) == 9  # the rest is no whole step
    with pytest.raises(ConfigError, match="rows: stored tables have their own sizes"):
        TableStream(file, rows=60)
    with pytest.raises(PriorError, match="the tables of step 0 differ in rows or labeled rows"):
        next(iter(TableStream(file, tables=2 * BATCH, dense=True)))


STAGE = "curriculum.stages.smoke"
SETTINGS = [
    *("experiment=smoke", "prior=hdf5", "trainer.accelerator=cpu", "checkpoint.every=2", "stream.num_workers=0"),
    *(f"{STAGE}.steps=6", f"{STAGE}.tables=8", f"{STAGE}.rows=[30,42]", f"{STAGE}.features=[1,5]"),
    f"{STAGE}.train_share=[0.286,0.5]",
]


def weights(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoints" / "step-00000006.ckpt", weights_only=False)["state_dict"]


@pytest.mark.slow
def test_a_continued_run_is_the_same_run(path, tmp_path):
    settings = [*SETTINGS, f"prior.file={path}"]
    assert train_short_run(tmp_path / "whole", settings=settings) == "finished"
    train_short_run(tmp_path / "parts", "trainer.max_steps=3", settings=settings)
    train_short_run(tmp_path / "parts", "stream.num_workers=1", settings=settings)
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weight, weights(tmp_path / "parts")[name])


def test_a_run_is_continued_on_the_same_file_only(path, tmp_path):
    copy = Path(shutil.copy(path, tmp_path / "copy.h5"))
    settings = [*SETTINGS, f"prior.file={copy}", "prior.passes=2", f"{STAGE}.steps=7"]
    assert train_short_run(tmp_path / "run", "trainer.max_steps=1", settings=settings) == "finished"
    other = Path(shutil.copy(path, tmp_path / "other.h5"))
    with h5py.File(other, "r+") as file:
        file["crc32"][47] += 1  # as of another last table
    other.rename(copy)
    with pytest.raises(ConfigError, match="is another run: the hash of the tables in files was"):
        train_short_run(tmp_path / "run", settings=settings)


def test_a_run_needs_the_sizes_and_the_tables_of_the_file(path):
    settings = [*SETTINGS, f"prior.file={path}"]
    assert missing_steps(compose(settings)) == []
    (line,) = missing_steps(compose([*settings, f"{STAGE}.steps=7"]))
    advice = "set trainer.max_steps=6 or prior.passes=2 or dump more"
    assert line == f"prior: its stored tables end after 6 of the run's 7 steps; {advice}"
    assert missing_steps(compose([*settings, f"{STAGE}.steps=7", "trainer.max_steps=6"])) == []
    assert missing_steps(compose([*settings, f"{STAGE}.steps=7", "prior.passes=2"])) == []
    (line,) = missing_steps(compose([*settings, f"{STAGE}.steps=13", "prior.passes=2"]))
    assert "end after 12 of the run's 13 steps; set trainer.max_steps=12 or prior.passes=3 or" in line
    assert compose([*settings, f"{STAGE}.rows=[20,50]", f"{STAGE}.features=[2,9]", f"{STAGE}.train_share=[0.2,0.6]"])
    for wrong, advice in (
        ("rows=[30,40]", "rows=[30,42]"),
        ("rows=[31,42]", "rows=[30,42]"),
        ("features=[1,4]", "features=[1,5]"),
        ("train_share=[0.3,0.6]", "train_share=[0.286,0.5]"),
    ):
        with pytest.raises(ConfigError) as error:
            compose([*settings, f"{STAGE}.{wrong}"])
        problem = f"curriculum.stages.smoke: the stored tables have other sizes; set {STAGE}.{advice}"
        assert error.value.problems == [problem]
    with pytest.raises(ConfigError, match=r"model.max_classes is 2, but the stored tables of prior=hdf5 have up to 3"):
        compose([*settings, "model.max_classes=2"])
    with pytest.raises(ConfigError, match=r"prior=hdf5 draws classes only, but model.max_classes=0 is regression"):
        compose([*settings, "model.max_classes=0"])
    with pytest.raises(ConfigError, match=r"validation.rows is .* since prior=hdf5 stores only"):
        compose([*settings, "validation.every=2", "validation.rows=[64]"])


def write(path: Path, **changes: np.ndarray | None) -> Path:
    """A file with as little as possible, of raw columns, as another program may write it."""
    rng = np.random.default_rng(0)
    X = rng.normal(5, 300, size=(6, 40, 3)).astype(np.float32)
    values = {"X": X, "y": (X[:, :, 0] > 5).astype(np.float32), "single_eval_pos": np.full(6, 25)} | changes
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            if value is not None:
                file[name] = value
    return path


def read(path: Path, number: int, max_classes: int = 10, keeps_missing: bool = False):
    prior = build_prior("hdf5", file=str(path))
    wanted = TableSpec(60, 30, 3, max_classes, keeps_missing=keeps_missing)
    return prior.sample(prior.stored_spec(number, 0, wanted), (0, 0, number))


def test_raw_tables_of_other_programs_are_standardized_and_keep_their_order(tmp_path):
    with h5py.File(write(tmp_path / "raw.h5"), "r+") as file:
        file["X"][2, 3, 0] = np.nan
        file["X"][2, :, 1] = 7.0  # constant
        file["X"][2, 30, 2] = 1e6  # an outlier
        X = file["X"][2]
        y = file["y"][2]
    filled = X[:, 0].copy()
    filled[3] = np.nanmean(X[:25, 0])
    for keeps_missing in (False, True):
        table = read(tmp_path / "raw.h5", 2, keeps_missing=keeps_missing)
        assert table.X.shape == (40, 2)
        assert table.train_size == 25
        assert table.num_classes == 2
        assert table.missing == pytest.approx(1 / 120)
        assert table.y.tolist() == y.tolist()
        known = np.delete(np.arange(40), 3) if keeps_missing else np.arange(40)
        expected = (filled - filled.mean()) / filled.std(ddof=1)
        np.testing.assert_allclose(table.X[known, 0], expected[known], atol=1e-4)
        assert table.X[3, 0].isnan() == keeps_missing
        assert table.X[30, 1] == table.X[:, 1].max() < 10
    numbers = read(tmp_path / "raw.h5", 1, max_classes=0)
    assert numbers.y.dtype == torch.float32 and numbers.num_classes == 0
    assert abs(numbers.y.mean()) < 1e-5
    assert numbers.y.std() == pytest.approx(1, abs=1e-5)


def test_each_pass_has_the_tables_in_other_permutations(tmp_path):
    prior = build_prior("hdf5", file=str(write(tmp_path / "raw.h5")), passes=3)
    wanted = TableSpec(60, 30, 3)
    first, second, third = (prior.sample(prior.stored_spec(number, 0, wanted), (0, 0, number)) for number in (2, 8, 14))
    assert torch.equal(first.X, read(tmp_path / "raw.h5", 2).X)
    for again in (second, third):
        rows = again.X.sum(1).argsort(), first.X.sum(1).argsort()
        columns = again.X[0].argsort(), first.X[rows[1][rows[0].argsort()][0]].argsort()
        assert torch.equal(again.X[rows[0]][:, columns[0]], first.X[rows[1]][:, columns[1]])
        classes = {tuple(pair) for pair in torch.stack([first.y[rows[1]], again.y[rows[0]]], 1).tolist()}
        assert len(classes) == 2
        assert not torch.equal(again.X[:25].sum(1).sort().values, first.X[:25].sum(1).sort().values)  # labeled rows
    assert not torch.equal(second.X, third.X)
    with pytest.raises(PriorError, match=r"raw.h5 has 6 tables .*, to be used 3 times; number 18 is missing"):
        prior.stored_spec(18, 0, wanted)
    stages = {"short": (2, 4), "long": (5, 2)}  # steps, and tables of a step
    assert prior.pass_lines(stages) == [
        "stage short: 6 tables are stored; pass 2 begins with step 1",
        "stage long: 6 tables are stored; pass 3 begins with step 4",
    ]


def test_what_a_file_does_not_say_is_found_in_its_labels(tmp_path):
    prior = build_prior("hdf5", file=str(write(tmp_path / "raw.h5")))
    assert prior.classes
    assert prior.numeric_targets
    assert prior.stored_classes == 2
    limited = write(tmp_path / "limited.h5", max_num_classes=np.array([4]))
    assert not build_prior("hdf5", file=str(limited)).numeric_targets
    assert build_prior("hdf5", file=str(limited)).largest(40, False) == (40, 3, 4)
    assert prior.largest(40, True) == (40, 3, None)
    numbers = build_prior("hdf5", file=str(write(tmp_path / "numbers.h5", problem_type="regression")))
    assert numbers.numeric_targets and not numbers.classes


def test_the_hash_is_that_of_the_tables_and_not_of_the_bytes(path, tmp_path):
    shutil.copy(path, tmp_path / "copy.h5")
    with h5py.File(tmp_path / "copy.h5", "r+") as file:
        X = file["X"][()]
        del file["X"]
        file["X"] = X  # without compression
        file["X"][:, 42:] = 9.0  # padding
    same = build_prior("hdf5", file=str(tmp_path / "copy.h5"))
    assert same.fingerprint() == build_prior("hdf5", file=str(path)).fingerprint()


FRACTIONS = np.full((6, 40), 0.5, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"X": None}, "wrong.h5 has no X; priors/README.md says"),
        ({"single_eval_pos": None}, "wrong.h5 has no train_test_split_index or single_eval_pos"),
        ({"y": np.zeros((6, 39))}, r"X of .* has the shape \(6, 40, 3\), and y \(6, 39\)"),
        ({"num_features": np.full(5, 3)}, "num_features of .* has 5 values; there are 6 tables"),
        (
            {"num_datapoints": np.array([40, 40, 41, 40, 40, 40])},
            "table 2 of .* has 41 rows, 25 of them labeled",
        ),
        ({"single_eval_pos": np.full(6, 40)}, "table 0 of .* has 40 rows, 40 of them labeled"),
        ({"y": FRACTIONS}, "the target of table 0 of .* has the value 0.5; labels are 0, 1, ..., 0"),
        ({"max_num_classes": np.array([1])}, "the target of table 0 of .* has the value 1; labels are 0, 1, ..., 0"),
        ({"X": np.ones((6, 40, 3))}, "all features of table 0 of .* are constant"),
        ({"X": np.ones((6, 40, 3), complex)}, "X of .* is of the type complex128; it must be a dataset of numbers"),
        ({"single_eval_pos": np.full(6, 19.9)}, "single_eval_pos of .* has the value 19.9; it must hold whole numbers"),
        ({"num_features": np.full(6, np.nan)}, "num_features of .* has the value nan; it must hold whole"),
        (
            {"num_datapoints": np.full(6, b"40")},
            "num_datapoints of .* is of the type .*S2; it must be a dataset",
        ),
        ({"max_num_classes": np.array([2.5])}, "max_num_classes of .* has the value 2.5"),
        ({"max_num_classes": np.array([2, 3])}, "max_num_classes of .* has 2 values; one is needed"),
        ({"max_num_classes": np.array([-1])}, "max_num_classes of .* is -1"),
        (
            {"train_test_split_index": np.array([25, 25, 25, 20, 25, 25])},
            "contradict each other: 25 and 20 labeled rows of table 3",
        ),
        ({"problem_type": "ranking"}, "problem_type of .* is 'ranking'; it must be classification or regression"),
        ({"problem_type": 1}, "problem_type of .* is of the type int64; it must be a dataset of text"),
        (
            {"problem_type": "regression", "max_num_classes": np.array([3])},
            "problem_type and max_num_classes of .* contradict each other: regression, 3",
        ),
        ({"y": np.full((6, 40), np.nan)}, "y of .* has no values, or infinite ones"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(changes, message, tmp_path):
    with pytest.raises(PriorError, match=message) as error:
        read(write(tmp_path / "wrong.h5", **changes), 0)
    assert "\n" not in str(error.value)
    (tmp_path / "text.h5").write_text("X")
    with pytest.raises(PriorError, match=r"text.h5 cannot be read as an HDF5 file \("):
        build_prior("hdf5", file=str(tmp_path / "text.h5"))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"format": "tabicl-train tables 1"},
            "the format tabicl-train tables 1, not .* 2: dump the tables again, or del",
        ),
        ({}, "has the attribute format of tabicl-prior dump, but not its others; delete it"),
        ({"prior": "mlp_scm", "options": "[]", "keeps_missing": "False"}, "but not its others"),
        ({"prior": "mlp_scm", "options": "[" * 10**5, "keeps_missing": "False"}, "but not its others"),
        ({"prior": "mlp_scm", "options": "{}", "keeps_missing": "False"}, "has no missing"),
    ],
)
def test_a_file_that_says_it_is_of_a_dump_must_be(attributes, message, tmp_path):
    with h5py.File(write(tmp_path / "raw.h5"), "r+") as file:
        file.attrs.update({"format": FORMAT} | {name: value[:60_000] for name, value in attributes.items()})
    with pytest.raises(PriorError, match=message):
        read(tmp_path / "raw.h5", 0)


NAMES = ("X", "y", "single_eval_pos", "num_features", "problem_type")
ELSEWHERE = ("external storage", "external link", "soft link", "virtual dataset", "group", "datatype")


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("name", NAMES)
def test_only_datasets_of_the_file_itself_are_read(name, kind, tmp_path):
    with h5py.File(write(tmp_path / "other.h5", num_features=np.full(6, 3))) as file:
        values = file["X"][()]
    (tmp_path / "other.bin").write_bytes(values.tobytes())
    with h5py.File(write(tmp_path / "wrong.h5", **({name: None} if name != "problem_type" else {})), "r+") as file:
        if kind == "external storage":
            file.create_dataset(name, values.shape, "f4", external=[(str(tmp_path / "other.bin"), 0, values.nbytes)])
        elif kind == "external link":
            file[name] = h5py.ExternalLink("other.h5", f"/{name}")
        elif kind == "soft link":
            file["aside"] = values
            file[name] = h5py.SoftLink("/aside")
        elif kind == "virtual dataset":
            layout = h5py.VirtualLayout(values.shape, "f4")
            layout[:] = h5py.VirtualSource("other.h5", "X", values.shape)
            file.create_virtual_dataset(name, layout)
        elif kind == "group":
            file.create_group(name)
        else:
            file[name] = np.dtype("f4")
    what = {"group": "a group", "datatype": "a datatype"}.get(kind, "a link" if "link" in kind else "stored in other")
    with pytest.raises(PriorError, match=rf"^prior hdf5: {name} of .*wrong.h5 is {what}.*; it must be a dataset of "):
        read(tmp_path / "wrong.h5", 0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("X", (2**40, 40, 3)),
        ("X", (6, 2**40, 3)),
        ("X", (2**33, 2**33, 2**33)),
        ("single_eval_pos", (2**40,)),
        ("max_num_classes", (2**40,)),
        ("problem_type", (2**40,)),
    ],
)
def test_a_shape_of_a_terabyte_allocates_nothing(name, shape, tmp_path):
    with h5py.File(write(tmp_path / "wrong.h5", single_eval_pos=None, y=None, X=None), "r+") as file:
        shapes = {"X": (6, 40, 3), "single_eval_pos": (6,)} | {name: shape}
        for each, size in shapes.items():
            kind = "S9" if each == "problem_type" else "i4"
            dataset = file.create_dataset(each, size, kind, chunks=tuple(min(length, 40) for length in size))
            if size != shape:
                dataset[:] = 20
        file.create_dataset("y", shapes["X"][:2], "f4", chunks=(6, 40))
    message = "but only 0 bytes are stored" if name == "X" else f"{name} of .* has {2**40} values"
    with pytest.raises(PriorError, match=message):
        read(tmp_path / "wrong.h5", 0)


# Folders of files.


STAGES = {
    "first": StageConfig(steps=14, rows=[30, 60], features=[2, 5], tables=4, group_size=2),
    "second": StageConfig(steps=7, rows=[30, 60], features=[2, 5], tables=4, group_size=2),
}
RUN = CurriculumConfig(STAGES)
MODEL = TabICLConfig(max_classes=3)  # with many classes in few rows, hardly any other split would be valid
SEED = 5


@pytest.fixture(scope="module", autouse=True)
def files_of_four_steps():
    with mock.patch("priors.dump.FILE_STEPS", 4):
        yield


def of_step(step: int, max_classes: int = 3) -> list:
    model = TabICLConfig(max_classes=max_classes)
    plan = plan_step(RUN, model, SEED, step)
    specs = {index: group.spec for group in plan.groups for index in group.tables}
    return [((SEED, step, index), specs[index]) for index in range(4)]


def dump(steps: range, folder: Path, prior: Prior = PRIOR, max_classes: int = 3, **settings) -> dict:
    requests_of = partial(of_step, max_classes=max_classes)
    return dump_folder(prior, requests_of, steps, 4 * steps.start, folder, max_classes, **settings)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory) -> Path:
    """Steps 0..9."""
    folder = tmp_path_factory.mktemp("dump") / "tables"
    assert dump(range(10), folder) == {"written": 3}
    return folder


def test_two_processes_draw_the_same_tables(tmp_path):
    assert dump(range(10), tmp_path / "tables", processes=2) == {"written": 3}
    assert_serves(tmp_path / "tables", range(10))


@pytest.fixture
def folder(dumped, tmp_path) -> Path:
    """A copy of the stored tables, to be changed."""
    return shutil.copytree(dumped, tmp_path / "copy")


def stored(folder: Path, **options) -> Prior:
    return build_prior("hdf5", file=str(folder), **options)


def assert_serves(folder: Path, steps: range, prior: Prior = PRIOR, max_classes: int = 3) -> None:
    served = pickle.loads(pickle.dumps(stored(folder)))  # as in worker processes
    for step in steps:
        for address, spec in of_step(step, max_classes):
            table = served.sample(served.stored_spec(4 * step + address[2], 0 if step < 14 else 56, spec), address)
            live = prior.sample(spec, address)
            assert table.X.dtype == torch.float32 and torch.equal(table.X, live.X)
            assert table.y.dtype == live.y.dtype and torch.equal(table.y, live.y)
            assert table.train_size == live.train_size
            assert table.num_classes == (int(live.y.max()) + 1 if max_classes else 0)
            assert table.missing == pytest.approx(live.missing)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every file, which change when it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize(("max_classes", "options"), [(3, {}), (0, {}), (3, {"realism": {"missing": 1.0}})])
def test_stored_tables_equal_drawn_ones(max_classes, options, dumped, tmp_path):
    prior = build_prior("mlp_scm", **options)
    if max_classes == 0 or options:
        assert dump(range(3), tmp_path, prior, max_classes) == {"written": 1}
        assert_serves(tmp_path, range(3), prior, max_classes)
        return
    assert names(dumped) == ["steps-00000000.h5", "steps-00000004.h5", "steps-00000008.h5"]
    assert_serves(dumped, range(10))
    assert_serves(dumped, range(10)[::-3])


def test_a_longer_dump_keeps_what_is_there_and_adds_to_the_last_file(folder):
    before = stamps(folder)
    assert dump(range(4, 7), folder) == {"kept": 1}
    assert stamps(folder) == before
    assert dump(range(8, 14), folder) == {"written": 2}
    after = stamps(folder)
    assert [name for name in before if before[name] == after[name]] == names(folder)[:2]
    assert_serves(folder, range(14))


def test_a_dump_that_is_interrupted_leaves_whole_files_only(folder, monkeypatch):
    for name in names(folder)[1:]:
        (folder / name).unlink()
    renamed = []

    def replace(source, target):
        assert not Path(target).exists() and os.path.getsize(source) > 1000
        renamed.append(Path(target).name)
        if len(renamed) == 2:
            raise KeyboardInterrupt

        os.rename(source, target)

    monkeypatch.setattr("priors.dump.os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        dump(range(10), folder)
    assert names(folder) == ["steps-00000000.h5", "steps-00000004.h5"]
    monkeypatch.undo()
    assert dump(range(10), folder) == {"kept": 2, "written": 1}
    assert_serves(folder, range(10))


@dataclass
class Killed(type(PRIOR)):
    """The same tables, but the process that draws one of step 9 is killed."""

    def sample(self, spec, seed):
        if seed[1] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(spec, seed)


@pytest.mark.slow  # 6 CPU seconds: its processes import everything
def test_a_killed_process_ends_the_dump_with_one_error(tmp_path):
    with pytest.raises(PriorError, match=r"a process that was drawing tables was killed.* the same command draws"):
        dump(range(12), tmp_path, Killed(), processes=2)
    assert not any(name.startswith((".", "steps-00000008")) for name in names(tmp_path))


def test_a_folder_holds_the_tables_of_one_dump_and_curriculum(folder):
    before = stamps(folder)
    for prior, message in (
        (build_prior("dummy"), "its prior is mlp_scm, not dummy"),
        (build_prior("mlp_scm", causal=True), "its options is .*, not .*causal"),
    ):
        with pytest.raises(PriorError, match=rf"steps-00000000.h5 belongs to another dump: {message}"):
            dump(range(2), folder, prior)
    with pytest.raises(PriorError, match=r"steps-00000000.h5 belongs to another curriculum"):
        dump_folder(PRIOR, lambda step: of_step(step + 1), range(4), 0, folder, 3)
    assert stamps(folder) == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", "6", "00000004.h5 belongs to another dump: its seed is 6, not 5"),
        ("stream_version", "7", f"00000004.h5 holds tables of stream version 7, .* at stream version {STREAM_VERSION}"),
        ("format", "tabicl-train tables 3", "00000004.h5 has the format tabicl-train tables 3, not tabicl-train tab"),
        ("first_table", "15", "00000004.h5 and .*00000000.h5 hold the same tables of a run"),
        ("first_table", "many", "00000004.h5 has the attribute format .* but not its others"),
    ],
)
def test_a_file_of_another_dump_or_version_is_refused(name, value, message, folder):
    with h5py.File(folder / "steps-00000004.h5", "r+") as file:
        file.attrs[name] = value
    with pytest.raises(PriorError, match=message):
        stored(folder)


@pytest.mark.parametrize("place", ["a value", "a label", "the split", "the share of missing cells", "the end"])
def test_a_damaged_file_is_named(place, folder):
    path = folder / "steps-00000004.h5"
    if place == "the end":
        path.write_bytes(path.read_bytes()[:-100])
        for use in (lambda: stored(folder), lambda: dump(range(10), folder)):
            with pytest.raises(PriorError, match=rf"{path} cannot be read as an HDF5 file \("):
                use()
        return
    with h5py.File(path, "r+") as file:
        match place:
            case "a value":
                file["X"][-1] = np.nextafter(file["X"][-1], np.float32(9))
            case "a label":
                file["y"][-1] = 1 - file["y"][-1] % 2
            case "the split":
                for name in ("train_test_split_index", "single_eval_pos"):
                    file[name][15] += 1
            case _:
                file["missing"][15] = 0.5
    served = stored(folder)
    (address, spec), (other, other_spec) = of_step(7)[3], of_step(7)[2]
    served.sample(served.stored_spec(30, 0, other_spec), other)  # other tables can be read
    with pytest.raises(PriorError, match=rf"table 15 of {path} is damaged .*: delete the file, and dump again"):
        served.sample(served.stored_spec(31, 0, spec), address)


def test_missing_steps_are_reported_before_they_are_needed(folder):
    settings = ["experiment=smoke", "prior=hdf5", f"prior.file={folder}", "model.max_classes=3", "stream.num_workers=0"]
    settings += [f"{STAGE}.tables=4", f"{STAGE}.rows=[30,60]", f"{STAGE}.features=[2,5]", f"{STAGE}.steps=10"]
    settings += [f"{STAGE}.train_share=[0.1,0.9]"]
    assert missing_steps(compose(settings)) == []
    (folder / "steps-00000004.h5").unlink()
    (line,) = missing_steps(compose(settings))
    assert line.endswith("end after 4 of the run's 10 steps; set trainer.max_steps=4 or prior.passes=3 or dump more")
    (folder / "steps-00000000.h5").unlink()
    (line,) = missing_steps(compose(settings))
    assert line.endswith("end after 0 of the run's 10 steps; dump more")
    (folder / "steps-00000008.h5").rename(folder / "steps-00000008.safetensors")
    with pytest.raises(
        ConfigError, match=r"has no files steps-\*.h5 of tabicl-prior dump .*0.2.0 wrote others: dump ag"
    ):
        compose(settings)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """The first four steps of one stage, its last two, and the first six of the next, in a file each of four."""
    folder = tmp_path_factory.mktemp("parts")
    for steps in (range(4), range(12, 20)):
        dump(steps, folder, build_prior("dummy"))
    return folder


def passed(folder: Path, passes: int, steps: range, rank: int = 0, ranks: int = 1) -> list:
    """The tables of steps, sorted, of one rank."""
    found = []
    for item in StepStream(stored(folder, passes=passes), RUN, MODEL, SEED, steps, rank, ranks):
        tables = [table for pack in item.packs for table in pack.tables()]
        found.append(sorted(tables, key=lambda table: table[0].min()))
    return found


def assert_same(steps: list, others: list) -> None:
    for tables, other_tables in zip(steps, others, strict=True):
        for (X, y, n), (other_X, other_y, other_n) in zip(tables, other_tables, strict=True):
            assert torch.equal(X, other_X) and torch.equal(y, other_y) and n == other_n


def test_a_pass_has_the_tables_of_its_stage_in_other_permutations(parts):
    items = passed(parts, 4, range(21))
    live = StepStream(build_prior("dummy"), RUN, MODEL, SEED, range(21))
    for step in (0, 3, 14, 19):
        drawn = [table for pack in live.draw(step).packs for table in pack.tables()]
        assert_same([items[step]], [sorted(drawn, key=lambda table: table[0].min())])
    assert_same(items[7:], passed(parts, 4, range(7, 21)))  # begun in the middle
    of_ranks = [passed(parts, 4, range(4, 5), rank, 2)[0] for rank in (0, 1)]
    assert_same(items[4:5], [sorted(of_ranks[0] + of_ranks[1], key=lambda table: table[0].min())])
    for step in (4, 7, 8, 13, 20):
        source = step % 4 if step < 14 else 14
        for (X, y, n), (other_X, other_y, other_n) in zip(items[source], items[step], strict=True):
            assert (X.shape, n) == (other_X.shape, other_n)
            # Their values are distinct, so that a row is known by its smallest one, and a column too.
            rows = other_X.min(1).values.argsort(), X.min(1).values.argsort()
            columns = other_X.min(0).values.argsort(), X.min(0).values.argsort()
            assert torch.equal(other_X[rows[0]][:, columns[0]], X[rows[1]][:, columns[1]])
            classes = {tuple(pair) for pair in torch.stack([y[rows[1]], other_y[rows[0]]], 1).tolist()}
            assert len(classes) == len(y.unique()) == len({new for _, new in classes})
            assert set(X[:n].min(1).values.tolist()) != set(other_X[:n].min(1).values.tolist())
    assert not torch.equal(items[4][0][0], items[8][0][0])


def test_each_stage_needs_enough_passes_and_says_where_they_begin(parts):
    once, twice, enough = (stored(parts, passes=passes) for passes in (1, 2, 4))
    assert [prior.stored_tables(0, 56) for prior in (once, twice, enough)] == [16, 32, 56]
    assert [prior.stored_tables(56, 28) for prior in (once, twice, enough)] == [24, 28, 28]
    assert [RUN.whole_steps(prior) for prior in (once, twice, enough)] == [4, 8, 21]
    assert once.pass_lines({"first": (14, 4), "second": (7, 4)}) == []
    assert enough.pass_lines({"first": (14, 4), "second": (7, 4)}) == [
        "stage first: 16 tables are stored; pass 2 begins with step 4, pass 3 begins with step 8, "
        "pass 4 begins with step 12",
        "stage second: 24 tables are stored; pass 2 begins with step 20",
    ]


def test_stored_tables_whose_order_has_a_meaning_are_not_passed_again(tmp_path):
    for facts, why in (
        ({"real_tables": "a hash"}, "real tables may have to stay apart"),
        ({"name": "quantifiers"}, "columns and rows of prior quantifiers have an order"),
        ({"name": "unknown"}, "name its plug-in"),
    ):
        folder = tmp_path / facts.get("name", "real")
        dump(range(1), folder, facts=facts)
        with pytest.raises(PriorError, match=f"passes is 2; it must be 1, since .*{why}"):
            stored(folder, passes=2)


def test_tables_of_a_network_that_sees_missing_values_are_not_those_of_another(dumped):
    prior = stored(dumped)
    wanted = TableSpec(60, 30, 3, keeps_missing=True)
    with pytest.raises(PriorError, match="was dumped for another network, and this one keeps missing values: dump ag"):
        prior.stored_spec(0, 0, wanted)
