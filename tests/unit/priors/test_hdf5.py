"""Tables in HDF5 files: those that are written, read as others read them, and the prior that reads those of others."""

import itertools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from training_runs import train_short_run

from priors import PriorError, TableSpec, build_prior
from priors.hdf5 import dump
from tabicl_train import TableStream
from tabicl_train.config.compose import compose
from tabicl_train.config.prior_checks import missing_steps
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICLConfig
from tabicl_train.stream import StepStream

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
    dump(PRIOR, requests(12), path, BATCH, 3)
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


@pytest.mark.parametrize("max_classes", [3, 0])
def test_the_prior_reads_what_was_drawn_to_the_bit(max_classes, path, tmp_path):
    if max_classes == 0:
        path = tmp_path / "numbers.h5"
        dump(PRIOR, requests(2, 0), path, BATCH, 0)
    prior = pickle.loads(pickle.dumps(build_prior("hdf5", file=str(path))))  # as in worker processes
    wanted = TableSpec(100, 50, 9, max_classes and 10)
    for number, (address, spec) in list(enumerate(requests(2, max_classes)))[::-1]:
        table, drawn = prior.sample(prior.stored_spec(number, wanted), 0), PRIOR.sample(spec, address)
        assert torch.equal(table.X, drawn.X)
        assert torch.equal(table.y, drawn.y)
        assert table.y.dtype == drawn.y.dtype
        assert table.train_size == drawn.train_size
        assert table.num_classes == (int(drawn.y.max()) + 1 if max_classes else 0)


def test_a_batch_of_tables_that_loaders_would_mix_up_is_refused(tmp_path):
    path = tmp_path / "tables.h5"
    path.write_text("old")
    with pytest.raises(PriorError, match=r"tables 0..7 are one batch, .*\(30 rows, 15 labeled\), but another .* 42"):
        dump(PRIOR, requests(2), path, 2 * BATCH, 3)
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
    with pytest.raises(ConfigError, match="rows: stored tables have sizes of their own"):
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
        file["y"][47, :5] = 1 - file["y"][47, :5]  # labels of the last table
    other.rename(copy)
    with pytest.raises(ConfigError, match="is another run: the hash of the tables in files was"):
        train_short_run(tmp_path / "run", settings=settings)


def test_a_run_needs_the_sizes_and_the_tables_of_the_file(path):
    settings = [*SETTINGS, f"prior.file={path}"]
    assert missing_steps(compose(settings)) == []
    (line,) = missing_steps(compose([*settings, f"{STAGE}.steps=7"]))
    assert line == "prior: its 48 tables end after 6 of the run's 7 steps; set trainer.max_steps=6 or prior.passes=2"
    assert missing_steps(compose([*settings, f"{STAGE}.steps=7", "trainer.max_steps=6"])) == []
    assert missing_steps(compose([*settings, f"{STAGE}.steps=7", "prior.passes=2"])) == []
    (line,) = missing_steps(compose([*settings, f"{STAGE}.steps=13", "prior.passes=2"]))
    assert line.endswith("its 96 tables end after 12 of the run's 13 steps; set trainer.max_steps=12 or prior.passes=3")
    for wrong, advice in (("rows=[30,40]", "rows=[30,42]"), ("train_share=[0.3,0.6]", "train_share=[0.286,0.5]")):
        with pytest.raises(ConfigError) as error:
            compose([*settings, f"{STAGE}.{wrong}"])
        problem = f"curriculum.stages.smoke: the stored tables have other sizes; set {STAGE}.{advice}"
        assert error.value.problems == [problem]
    with pytest.raises(ConfigError, match=r"model.max_classes is 2, but the stored tables of prior=hdf5 have up to 3"):
        compose([*settings, "model.max_classes=2"])
    with pytest.raises(ConfigError, match=r"prior=hdf5 draws classes only, but model.max_classes=0 is regression"):
        compose([*settings, "model.max_classes=0"])
    with pytest.raises(ConfigError, match=r"validation.rows must be \[\] with prior=hdf5"):
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
    return prior.sample(prior.stored_spec(number, wanted), (0, 0, number))


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
    first, second, third = (prior.sample(prior.stored_spec(number, wanted), (0, 0, number)) for number in (2, 8, 14))
    assert torch.equal(first.X, read(tmp_path / "raw.h5", 2).X)
    for again in (second, third):
        rows = again.X.sum(1).argsort(), first.X.sum(1).argsort()
        columns = again.X[0].argsort(), first.X[rows[1][rows[0].argsort()][0]].argsort()
        assert torch.equal(again.X[rows[0]][:, columns[0]], first.X[rows[1]][:, columns[1]])
        classes = {tuple(pair) for pair in torch.stack([first.y[rows[1]], again.y[rows[0]]], 1).tolist()}
        assert len(classes) == 2
        assert not torch.equal(again.X[:25].sum(1).sort().values, first.X[:25].sum(1).sort().values)  # labeled rows
    assert not torch.equal(second.X, third.X)
    with pytest.raises(PriorError, match=r"raw.h5 ends after 3 x 6 tables; prior.passes=4 uses them again"):
        prior.stored_spec(18, wanted)
    stages = {"short": (2, 4), "long": (5, 2)}  # steps, and tables of a step
    assert prior.pass_lines(stages) == ["6 tables are stored; pass 2 begins with step 1, pass 3 begins with step 4"]


def test_what_a_file_does_not_say_is_found_in_its_labels(tmp_path):
    prior = build_prior("hdf5", file=str(write(tmp_path / "raw.h5")))
    assert prior.classes
    assert prior.numeric_targets
    assert prior.contents.most_classes == 2
    limited = write(tmp_path / "limited.h5", max_num_classes=np.array([4]))
    assert not build_prior("hdf5", file=str(limited)).numeric_targets
    assert build_prior("hdf5", file=str(limited)).largest(40, False) == (None, None, 4)
    assert prior.largest(40, True) == (None, None, None)
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
    ("attributes", "changes", "max_classes", "message"),
    [
        ({}, {}, 10, "has the attribute format of tabicl-prior dump, but not its others; delete that attribute"),
        ({"prior": "mlp_scm", "options": "[]"}, {}, 10, "but not its others"),
        ({"prior": "mlp_scm", "options": "{}"}, {}, 10, "table 0 of .* is not standardized .* delete that attribute"),
        ({"prior": "unknown", "options": "{}"}, {}, 10, "table 0 of .* is not standardized"),
        ({"prior": "mlp_scm", "options": "{}"}, {"X": np.full((6, 40, 3), np.nan)}, 10, "is not standardized"),
        (
            {"prior": "mlp_scm", "options": "{}"},
            {"X": np.ones((6, 40, 3)), "y": np.full((6, 40), 1e4), "problem_type": "regression"},
            0,
            "is not standardized .the size of a value is 1e.04",
        ),
    ],
)
def test_a_file_that_says_it_is_standardized_must_be(attributes, changes, max_classes, message, tmp_path):
    with h5py.File(write(tmp_path / "raw.h5", **changes), "r+") as file:
        file.attrs.update({"format": "tabicl-train tables 1"} | attributes)
    with pytest.raises(PriorError, match=message):
        read(tmp_path / "raw.h5", 0, max_classes)


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
