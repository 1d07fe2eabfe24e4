"""Tables in a pack: the network computes for each what it computes for it alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import small_network
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tabicl_train.model.attention import attend_at_once
from tabicl_train.model.pack import Pack, Spans, column_layout, context_layout, one_hot_sums, row_layout
from tabicl_train.model.scaling import per_query
from tabicl_train.training.module import query_losses

V1 = dict(col_affine=True, col_grouping="none", col_target_aware=False, col_scaling="none", icl_scaling="none")
SSA = dict(col_scaling="ssa_trainable", icl_scaling="ssa")
OPTIONS = [  # each takes a CPU second
    {},
    pytest.param(V1, marks=pytest.mark.slow),
    pytest.param(SSA, marks=pytest.mark.slow),
    {"col_grouping": "disjoint", "icl_scaling": "ssmax", "row_rope_interleaved": True},
]


@st.composite
def a_table(draw):
    """Rows, labeled rows, features, classes."""
    rows = draw(st.integers(2, 40))
    return rows, draw(st.integers(1, rows - 1)), draw(st.integers(1, 9)), draw(st.integers(1, 10))


def fill(shapes: list[tuple[int, int, int, int]], seed: int = 0) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(N, M, generator=generator), torch.randint(classes, (N,), generator=generator), n)
        for N, n, M, classes in shapes
    ]


def close(a: Tensor, b: Tensor) -> bool:
    """Equal to 1e-5 of the norm."""
    return bool((a - b).norm() <= 1e-5 * b.norm())


def losses_and_gradient(network, pack: Pack, share: float) -> tuple[Tensor, Tensor]:
    """The losses of a pack's tables, and the gradient of `share` times their sum."""
    losses = query_losses(network, pack)
    parameters = [p for p in network.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(losses.sum() * share, parameters, materialize_grads=True)
    return losses.detach(), torch.cat([slope.flatten() for slope in slopes])


@pytest.mark.parametrize("options", OPTIONS)
@settings(deadline=None, derandomize=True, max_examples=5)
@given(st.lists(a_table(), min_size=1, max_size=6), st.booleans())
def test_a_pack_is_its_tables_one_by_one(options, shapes, repeated):
    network = small_network(**options)
    tables = fill([shape for shape in shapes for _ in range(1 + repeated)])  # repeated: of equal shape in a row
    pack = Pack.of(tables)
    together = network(pack)
    alone = [network(Pack.of([table])) for table in tables]
    assert close(together, torch.cat(alone))
    losses, gradient = losses_and_gradient(network, pack, 1 / len(tables))
    each = [losses_and_gradient(network, Pack.of([table]), 1 / len(tables)) for table in tables]
    assert close(losses, torch.cat([loss for loss, _ in each]))
    assert close(gradient, sum(slope for _, slope in each))


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.lists(a_table(), min_size=1, max_size=7))
def test_a_pack_holds_its_tables(shapes):
    tables = fill(shapes)
    pack = Pack.of(iter(tables))
    assert len(pack) == len(tables)
    assert pack.shapes == tuple(shape[:3] for shape in shapes)
    assert pack.sizes.tolist() == [list(shape) for shape in pack.shapes]
    assert pack.sizes.dtype == torch.int64
    assert pack.cells == sum(N * M for N, _, M, _ in shapes) == len(pack.X)
    for (X, y, n), (expected_X, expected_y, expected_n) in zip(pack.tables(), tables, strict=True):
        assert torch.equal(X, expected_X)
        assert torch.equal(y, expected_y)
        assert n == expected_n
    assert torch.equal(pack.queries(), torch.cat([y[n:] for _, y, n in tables]))

    values = torch.rand(len(pack.queries()), generator=torch.Generator().manual_seed(1))
    of_tables = values.split([N - n for N, n, _, _ in shapes])
    expected = torch.stack([of_table.mean() for of_table in of_tables])
    torch.testing.assert_close(pack.means(values), expected, rtol=1e-6, atol=0)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.lists(a_table(), min_size=2, max_size=7))
def test_halves_of_a_pack_are_packs_of_its_first_and_last_tables(shapes):
    tables = fill(shapes)
    first, second = Pack.of(iter(tables)).halves()
    assert 0 <= len(first) - len(second) <= 1
    for half, expected in ((first, Pack.of(tables[: len(first)])), (second, Pack.of(tables[len(first) :]))):
        assert half.shapes == expected.shapes
        for name in ("X", "y", "sizes"):
            assert torch.equal(getattr(half, name), getattr(expected, name))


def test_a_stack_is_a_pack_of_equal_tables():
    X = torch.rand(3, 8, 2)
    y = torch.randint(5, (3, 6))
    pack = Pack.stack(X, y)

    labels = torch.cat([y, torch.zeros(3, 2, dtype=torch.int64)], 1)
    expected = Pack.of((X[table], labels[table], 6) for table in range(3))
    assert pack.shapes == expected.shapes
    for name in ("X", "y", "sizes"):
        assert torch.equal(getattr(pack, name), getattr(expected, name))


def test_the_layouts_of_two_tables_are_those_of_the_example():
    """The example in the docstring of model/pack.py: N, n, G of table a are 3, 2, 2, those of table b 2, 1, 1."""
    shapes = [(3, 2, 2), (2, 1, 1)]
    columns = column_layout(torch.tensor(shapes), shapes, inducing=4)
    rows = row_layout(torch.tensor(shapes), shapes, 1, columns)
    context = context_layout(torch.tensor(shapes), shapes)

    spans = columns.from_inducing
    assert spans.runs.tolist() == [[2, 2, 4, 0, 0], [1, 1, 4, 8, 0], [2, 1, 4, 0, 0], [1, 1, 4, 8, 0]]
    assert spans.query_ends.tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert spans.key_ends.tolist() == [0, 4, 8, 12, 16, 20, 24]

    assert rows.within.every.runs.tolist() == [[2, 2, 2, 0, 0], [3, 3, 3, 4, 0]]
    assert rows.within.cls.tolist() == [0, 2, 4, 7, 10]
    assert rows.tokens.tolist() == [5, 8, 6, 9, 1, 11, 12, 3]
    assert rows.order.tolist() == [2, 3, 0, 4, 1]

    assert context.table.tolist() == [0, 0, 1, 0, 1]
    assert context.all.runs.tolist() == [[1, 2, 2, 0, 0], [1, 1, 1, 2, 0], [1, 1, 2, 0, 0], [1, 1, 1, 2, 0]]


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_gradients_of_repeated_rows_are_summed_in_order_and_in_fp32_on_a_gpu(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(4).repeat_interleave(50)  # 50 columns of each table
    values = torch.randn(200, 3, 16, generator=generator).bfloat16()
    exact = torch.zeros(4, 3, 16, dtype=torch.float64).index_add_(0, index, values.double())
    added = torch.zeros_like(values[:4])
    for row, table in zip(values, index, strict=True):  # as by atomic operations in bf16
        added[table] += row
    errors = [
        ((sums.double() - exact).norm() / exact.norm()).item() for sums in (one_hot_sums(values, index, 4), added)
    ]
    assert errors[0] < 0.003 < 0.005 < errors[1]
    # On a CPU the bits are those of autograd's own rule.
    base = torch.randn(4, 3, 16, generator=generator, requires_grad=True)
    weights = torch.randn(200, 3, 16, generator=generator)
    taken, plain = per_query(base, index), base.index_select(0, index)
    assert torch.equal(taken, plain)
    expected, gradient = (torch.autograd.grad((x * weights).sum(), base, retain_graph=True)[0] for x in (plain, taken))
    assert torch.equal(gradient, expected)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with Operators() as called:
        (gradient,) = torch.autograd.grad((taken * weights).sum(), base)
    torch.testing.assert_close(gradient, expected)
    assert "aten::mm" in called.names
    assert not {n for n in called.names if "index_" in n or "scatter" in n}


class InTF32(TorchDispatchMode):
    """Rounds the factors of products toward zero to the 10 bits that TF32 keeps of a fraction."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name == "aten::mm":
            args = [(x.view(torch.int32) & -(2**13)).view(torch.float32) for x in args]
        return function(*args, **(kwargs or {}))


def test_sums_of_fp32_gradients_are_in_full_precision_also_with_tf32():
    values = torch.randn(200, 3, 16, generator=torch.Generator().manual_seed(0))
    index = torch.arange(4).repeat_interleave(50)
    exact = torch.zeros(4, 3, 16, dtype=torch.float64).index_add_(0, index, values.double())
    with InTF32():
        sums = one_hot_sums(values, index, 4)
    assert (sums.double() - exact).norm() / exact.norm() < 1e-6  # 5e-4 if the values are rounded


def test_shared_queries_are_taken_by_a_rule_with_repeatable_gradients():
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, 16, dtype=torch.bfloat16, requires_grad=True)  # of two tables
        k = torch.empty(30, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        ends, keys = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
        spans = Spans(torch.empty(0), 24, ends, keys, 8, 10, table=torch.empty(3, dtype=torch.int64))
        out = attend_at_once(q, k, k, spans)
    names, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        names.add(node.name())
        left += [following for following, _ in node.next_functions if following is not None]
    assert "TakeRowsBackward" in names
    assert not {name for name in names if name.startswith("Index")}
