import ctypes
import hashlib
import json
import os
import random
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import table_files
import torch
from forked import start_process, wait_for_exit_code

from priors import Prior, PriorError, TableSpec, build_prior, prior_class, prior_names
from priors.finish import Rejected
from tabicl_train import lab  # which registers priors, with the same interface

LIVE = [name for name in prior_names() if name != "hdf5"]  # which serves what others drew
SPEC = TableSpec(num_rows=90, train_size=50, num_features=5, max_classes=4, group_seed=(3, 0))
SPECS = {"classes": SPEC, "numbers": replace(SPEC, max_classes=0)}
NUMERIC = [name for name in LIVE if prior_class(name).numeric_targets]
# The others are in tests/unit/lab/test_sequence_priors.py.
FINISHED = [name for name in LIVE if not prior_class(name).raw]
CASES = [f"{name} classes" for name in LIVE if prior_class(name).classes] + [f"{name} numbers" for name in NUMERIC]
SEEDS = [7, (7, 1), (2**40, 0)]
M_PERTURB = -6  # of mallopt


def digest(table) -> str:
    parts = [table.X.numpy().tobytes(), table.y.numpy().tobytes(), repr((table.X.shape, table.train_size)).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def digests(seeds=tuple(SEEDS)) -> dict[str, list[str]]:
    return {case: [digest(draw(case, seed)) for seed in seeds] for case in CASES}


def draw(case: str, seed):
    """The table of a prior with classes or numbers as target."""
    name, target = case.split()
    return build(name).sample(SPECS[target], seed)


def build(name: str) -> Prior:
    folder = table_files.shared_table_files()
    options: dict[str, dict] = {
        "tables": {"folder": folder, "validation_fraction": 0.0, "test_fraction": 0.0},
        "one_table": {"file": f"{folder}/table3.csv", "target": "size"},  # five numbers, which can be classes too
    }
    return build_prior(name, **options.get(name, {}))


@pytest.fixture(scope="module")
def drawn():
    return digests()


def test_every_prior_has_a_yaml_file_and_every_yaml_file_has_a_prior():
    schema_of = {}
    for folder in (Path(__file__).parents[3] / "configs", Path(lab.__file__).parent / "configs"):
        for file in folder.glob("prior/*.yaml"):
            match = re.search(r"schema/(\w+)", file.read_text())
            if match:  # other files change one of these
                schema_of[file.stem] = match[1]
    for name in prior_names():
        assert schema_of.get(name) == name
    assert set(schema_of.values()) == set(prior_names())  # a variant has its prior's schema


def draw_elsewhere(path: Path, hash_here: int) -> None:
    """Write the digests of tables that a process draws whose texts have other hashes and whose memory is filled."""
    assert hash("hash") != hash_here or "PYTHONHASHSEED" in os.environ
    if sys.platform == "linux":  # glibc fills memory with a pattern when it is allocated, and when it is freed
        assert ctypes.CDLL(None).mallopt(M_PERTURB, 165) == 1
    path.write_text(json.dumps(digests([7])))


def test_another_process_with_other_hashes_and_memory_draws_the_same_tables(drawn, tmp_path):
    # The server from which processes are forked is a Python of its own.
    process = start_process(draw_elsewhere, tmp_path / "drawn", hash("hash"), stderr=tmp_path / "stderr")
    assert wait_for_exit_code(process) == 0, (tmp_path / "stderr").read_text()
    assert json.loads((tmp_path / "drawn").read_text()) == {case: values[:1] for case, values in drawn.items()}


@pytest.mark.parametrize("case", CASES)
def test_tables_do_not_depend_on_the_order_nor_on_global_random_state(case, drawn):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    backwards = [digest(draw(case, seed)) for seed in reversed(SEEDS)]
    assert backwards[::-1] == drawn[case] and len(set(backwards)) == len(SEEDS)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert before[0] == after[0]
    assert (before[1][1] == after[1][1]).all()
    assert before[1][2] == after[1][2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("case", CASES)
def test_seed_7_is_the_address_7_and_no_address_is_padded(case, drawn):
    assert digest(draw(case, (7,))) == digest(draw(case, np.int64(7))) == drawn[case][0]
    others = [digest(draw(case, seed)) for seed in (1, (1, 0), (0, 1), 2**32 + 1)]
    assert len(set(others)) == 4


@pytest.mark.parametrize("name", FINISHED)
def test_tables_have_the_documented_shapes_types_and_ranges(name):
    prior = build(name)
    for seed in range(8):
        spec = TableSpec(120 + seed, 60, 1 + seed, max_classes=2 + seed)
        table = prior.sample(spec, seed)
        assert table.X.dtype == torch.float32 and table.y.dtype == torch.int64
        assert table.X.shape[0] == len(table.y) == spec.num_rows
        assert table.train_size == 60
        assert 1 <= table.X.shape[1] <= spec.num_features
        assert table.X.isfinite().all()
        assert 2 <= table.num_classes <= max(spec.max_classes, 5 if name == "one_table" else 0)
        assert table.y.min() >= 0 and table.y.max() < table.num_classes
        assert set(table.y[:60].tolist()) == set(table.y[60:].tolist())
        assert len(str(table.plan)) > 10
        assert " object at 0x" not in str(table.plan)


@pytest.mark.parametrize("name", [name for name in FINISHED if name in NUMERIC])
def test_numeric_targets_have_the_documented_shapes_types_and_moments(name):
    prior = build(name)
    for seed in range(8):
        spec = TableSpec(120 + seed, 60 + 7 * seed, 1 + seed, max_classes=0)
        table = prior.sample(spec, seed)
        assert table.y.dtype == torch.float32
        assert table.num_classes == 0
        assert table.y.is_contiguous()
        assert table.X.shape[0] == len(table.y) == spec.num_rows
        assert table.train_size == spec.train_size
        assert table.X.dtype == torch.float32
        assert table.X.isfinite().all()
        assert table.y.isfinite().all()
        y = table.y.double()[: 60 + 7 * seed if name == "one_table" else None]  # of the labeled rows
        std = y.std(correction=name != "one_table")  # scikit-learn, and so the estimators, divide by n
        assert abs(y.mean()) < 1e-6
        assert abs(std - 1) < 1e-6
        assert len(y.unique()) >= 2
        assert "numeric target" in str(table.plan)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TableSpec(100, 50, 0, 1), "num_features is 0; at least 1 is needed; max_classes is 1; it must lie in 2..10"),
        (TableSpec(9, 5, 3, 2), "num_rows is 9; at least 10 are needed"),
        (TableSpec(100, 100, 3), "train_size is 100; it must lie in 1..num_rows-1 = 1..99"),
        (TableSpec(100, 50, 3, 11), "max_classes is 11; it must lie in 2..10, or be 0 for a numeric target"),
        (TableSpec(12, 8, 3, 5), "each class needs a labeled and a query row (8 labeled, 4 query rows)"),
    ],
)
def test_the_error_for_an_impossible_spec_is_one_line(spec, message):
    with pytest.raises(PriorError) as caught:
        build_prior("dummy").sample(spec, 0)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_prior_of_classes_refuses_numeric_targets():
    message = "this prior draws classes only, but max_classes is 0"
    with pytest.raises(PriorError, match=message):
        build_prior("needle").sample(SPECS["numbers"], 0)
    with pytest.raises(PriorError, match=f"component needle: {message}"):
        build_prior("mix_scm", components={"needle": {"weight": 1}}).sample(SPECS["numbers"], 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"preset": 3}, "preset is 3; it must be of type str"),
        ({"node_noise": 1}, "node_noise is 1; it must be of type bool"),
        ({"preset": "old"}, "preset is 'old'; it must be one of corrected, released"),
    ],
)
def test_a_wrong_value_is_reported(option, message):
    with pytest.raises(PriorError, match=f"prior graph_scm: .*{message}"):
        build_prior("graph_scm", **option)


@dataclass
class Stubborn(Prior):
    """Noise whose first attempts fail, in the plan, the execution, the finishing and the filter, in turn."""

    failures: int = 0
    attempts: list[int] = field(default_factory=list)

    def plan(self, spec, seed):
        self.attempts.append(seed[-1])
        if seed[-1] < self.failures and seed[-1] % 4 == 0:
            raise Rejected("plan")
        return f"attempt {seed[-1]}"

    def execute(self, plan):
        attempt = int(plan.split()[1])
        failing = attempt < self.failures
        if failing and attempt % 4 == 1:
            raise Rejected("execute")
        columns = torch.arange(40.0)[:, None]
        if failing and attempt % 4 == 2:
            columns = columns * torch.nan
        return columns, torch.arange(40) % 2, 2

    def accept(self, table, seed):
        if seed[-1] < self.failures and seed[-1] % 4 == 3:
            raise Rejected("filter")


def test_rejected_draws_are_redrawn_and_counted():
    prior = Stubborn(failures=10)
    table = prior.sample(TableSpec(40, 20, 1, 2), 5)
    assert table.rejections == {"plan": 3, "execute": 3, "nan": 2, "filter": 2}
    assert table.plan == "attempt 10"
    assert prior.attempts == list(range(11))
    assert Stubborn().sample(TableSpec(40, 20, 1, 2), 5).rejections == {}


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
        ("split", "lower max_classes"),
        ("unpredictable", "filter of unpredictable tables"),
        ("nan", "num_features"),
        ("target", "the numeric target is constant or not finite"),
    ],
)
def test_after_1000_rejections_the_setting_to_change_is_named(reason, setting):
    class Never(Stubborn):
        def accept(self, table, seed):
            raise Rejected(reason if seed[-1] % 10 else "other")

    prior = Never()
    with pytest.raises(PriorError) as caught:
        prior.sample(TableSpec(40, 20, 1, 2), 5)
    assert len(prior.attempts) == 1000
    assert f"({reason} 900x, other 100x)" in str(caught.value)
    assert setting in str(caught.value) and "num_rows=40" in str(caught.value)
