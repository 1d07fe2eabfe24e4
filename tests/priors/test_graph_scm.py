import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from priors import PriorError, TableSpec, build_prior
from priors.graph.converters import Categorical, Numeric
from priors.graph.execute import execute_plan

SPEC = TableSpec(num_rows=80, train_size=40, num_features=6)


def digest(table) -> str:
    data = hashlib.blake2b(table.X.numpy().tobytes() + table.y.numpy().tobytes(), digest_size=8)
    return f"{data.hexdigest()} {table.num_classes} {table.plan!s} {sorted(table.rejections.items())}"


def check_table(table, spec: TableSpec):
    assert table.X.dtype == torch.float32 and table.y.dtype == torch.int64
    assert table.X.shape[0] == spec.num_rows and 1 <= table.X.shape[1] <= spec.num_features
    assert torch.isfinite(table.X).all() and table.X.abs().max() <= 100
    np.testing.assert_allclose(table.X.double().mean(0), 0, atol=1e-3)
    assert table.train_size == spec.train_size
    train, query = table.y[: spec.train_size].unique(), table.y[spec.train_size :].unique()
    assert torch.equal(train, query) and len(train) >= 2
    assert 0 <= train.min() and train.max() < table.num_classes <= spec.max_classes


@pytest.mark.multi_process
@pytest.mark.parametrize("preset", ["corrected", "released"])
def test_a_table_is_a_pure_function_of_its_address_in_any_process(preset: str):
    program = (
        "import hashlib\n"
        "import torch\n"
        "from priors import TableSpec, build_prior\n"
        f"prior = build_prior('graph_scm', preset={preset!r})\n"
        "for seed in range(6):\n"
        "    table = prior.sample(TableSpec(num_rows=80, train_size=40, num_features=6), (seed, 1))\n"
        "    print(hashlib.blake2b(table.X.numpy().tobytes() + table.y.numpy().tobytes()).hexdigest())\n"
        "    print(hashlib.blake2b(str(table.plan).encode()).hexdigest(), sorted(table.rejections.items()))\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    other_process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    prior = build_prior("graph_scm", preset=preset)
    digests = []
    for seed in reversed(range(6)):  # another order
        table = prior.sample(SPEC, (seed, 1))
        data = hashlib.blake2b(table.X.numpy().tobytes() + table.y.numpy().tobytes()).hexdigest()
        text = hashlib.blake2b(str(table.plan).encode()).hexdigest()
        digests = [data, f"{text} {sorted(table.rejections.items())}", *digests]
    assert digests == other_process and len(set(digests)) > 6


def test_the_global_generators_are_left_alone():
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    build_prior("graph_scm").sample(SPEC, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_the_number_of_threads_is_left_alone():
    threads = torch.get_num_threads()
    build_prior("graph_scm").sample(SPEC, 0)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("preset", ["corrected", "released"])
@pytest.mark.parametrize("num_features", [1, 2, 17, 100])
def test_tables_of_any_width(preset: str, num_features: int):
    spec = TableSpec(num_rows=100, train_size=50, num_features=num_features)
    prior = build_prior("graph_scm", preset=preset)
    for seed in range(5):
        check_table(prior.sample(spec, seed), spec)


@pytest.mark.parametrize("num_rows", [20, 100, 20000])
def test_tables_of_any_length(num_rows: int):
    spec = TableSpec(num_rows=num_rows, train_size=num_rows // 2, num_features=4)
    prior = build_prior("graph_scm")
    for seed in range(2):
        check_table(prior.sample(spec, seed), spec)


def test_the_classes_are_capped():
    spec = TableSpec(num_rows=60, train_size=30, num_features=3, max_classes=2)
    assert {build_prior("graph_scm").sample(spec, seed).num_classes for seed in range(8)} == {2}


@pytest.mark.parametrize("count", [1, 32])
def test_graphs_of_any_size(count: int):
    prior = build_prior("graph_scm", min_nodes=count, max_nodes=count, node_noise=True)
    for seed in range(3):
        check_table(prior.sample(SPEC, seed), SPEC)


def test_the_presets_differ():
    released, corrected = (build_prior("graph_scm", preset=preset) for preset in ("released", "corrected"))
    assert digest(released.sample(SPEC, 0)) != digest(corrected.sample(SPEC, 0))
    assert build_prior("graph_scm").preset == "corrected"

    def purity(prior):
        """Share of the commonest function kind in a large plan."""
        shares = []
        for seed in range(150):
            kinds = [f.kind for node in prior.plan(SPEC, (seed,)).nodes for f in node.functions]
            if len(kinds) >= 12:
                shares.append(max(map(kinds.count, kinds)) / len(kinds))
        return np.mean(shares)

    assert purity(released) < 0.4 < 0.45 < purity(corrected)  # choices are independent, or share probabilities

    def warps(prior):
        return {
            column.converter.warp_flow
            for seed in range(40)
            for node in prior.plan(SPEC, (seed,)).nodes
            for column in node.columns
            if isinstance(column.converter, Numeric) and column.converter.mode == "warp"
        }

    assert warps(released) == {True} and warps(corrected) == {False}


def test_plans_are_executed_as_written(monkeypatch):
    monkeypatch.setattr("priors.graph.execute.check_classes", lambda labels: None)
    prior = build_prior("graph_scm")
    for seed in range(20):
        plan = prior.plan(SPEC, (seed,))
        columns, labels, num_classes = prior.execute(plan)
        assert columns.shape == (80, 6) and columns.dtype == torch.float32
        assert labels.shape == (80,) and labels.dtype == torch.int64
        assert 0 <= labels.min() and labels.max() < num_classes == plan.num_classes
        for node in plan.nodes:
            for column in node.columns:
                if isinstance(column.converter, Categorical) and column.index >= 0:
                    values = columns[:, column.index]
                    assert (values == values.round()).all()
                    assert 0 <= values.min() and values.max() < column.converter.cardinality


@pytest.mark.parametrize(("reason", "spoil"), [("nan", "columns"), ("split", "labels"), ("constant", "constant")])
def test_spoiled_draws_are_rejected_and_counted(reason: str, spoil: str, monkeypatch):
    calls = []

    def spoiled(plan, device):
        columns, labels = execute_plan(plan, device)
        calls.append(plan.address)
        if len(calls) <= 3:
            if spoil == "columns":
                columns = columns.clone()
                columns[5, 2] = float("nan")
            elif spoil == "constant":
                columns = torch.ones_like(columns)
                labels = torch.arange(len(labels)) % 2
            else:
                labels = torch.zeros_like(labels)
        elif spoil == "constant":
            columns[:, 0] = torch.arange(len(columns))
        return columns, labels

    monkeypatch.setattr("priors.graph_scm.execute_plan", spoiled)
    monkeypatch.setattr("priors.graph.execute.check_classes", lambda labels: None)
    if spoil == "columns":
        monkeypatch.setattr("priors.finish.split_rows", lambda *a: None)
    table = build_prior("graph_scm", filter_unpredictable_tables=False).sample(SPEC, 5)
    assert table.rejections[reason] >= 3
    assert table.rejections.total() == len(calls) - 1
    assert calls == [(5, attempt) for attempt in range(len(calls))]


def test_a_request_that_is_always_rejected_ends_with_an_error_that_names_the_reasons(monkeypatch):
    monkeypatch.setattr("priors.prior.MAX_REJECTIONS", 5)
    monkeypatch.setattr(
        "priors.graph_scm.execute_plan", lambda plan, device: (torch.randn(80, 6), torch.zeros(80, dtype=torch.long))
    )
    with pytest.raises(PriorError, match="split 5x"):
        build_prior("graph_scm").sample(SPEC, 0)


def test_the_filter_of_unpredictable_tables_is_an_option(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "priors.graph.predictability.check_predictability", lambda *arguments: calls.append(arguments[2:])
    )
    build_prior("graph_scm", filter_unpredictable_tables=False).sample(SPEC, 0)
    assert calls == []
    build_prior("graph_scm").sample(SPEC, 0)
    build_prior("graph_scm", filter_unpredictable_tables=False, filter_trivial_tables=True).sample(SPEC, 0)
    assert calls == [(True, False), (False, True)]


def test_unpredictable_tables_are_rejected():
    counts = [build_prior("graph_scm").sample(SPEC, seed).rejections["unpredictable"] for seed in range(20)]
    assert sum(counts) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "original"}, "preset is 'original'; it must be one of corrected, released"),
        ({"min_nodes": 0}, "min_nodes is 0"),
        ({"min_nodes": 9, "max_nodes": 4}, "min_nodes is 9, max_nodes is 4"),
        ({"max_cardinality": 1}, "max_cardinality is 1; at least 2"),
        ({"device": "tpu"}, "device is 'tpu'; it must be cpu or cuda"),
    ],
)
def test_wrong_options_are_reported(options: dict, message: str):
    with pytest.raises(PriorError, match=message):
        build_prior("graph_scm", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is for machines without CUDA")
def test_a_missing_device_is_reported():
    with pytest.raises(PriorError, match="no CUDA device"):
        build_prior("graph_scm", device="cuda:0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tables_are_drawn_on_a_cuda_device():
    prior = build_prior("graph_scm", device="cuda")
    for seed in range(10):
        table = prior.sample(SPEC, seed)
        assert table.X.is_cuda and table.y.is_cuda
        assert torch.equal(table.X, prior.sample(SPEC, seed).X)
