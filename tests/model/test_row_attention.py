"""Attention within rows: against float64 softmax, on the compiled and the plain path, and as an operation of torch."""

import subprocess
import sys

import pytest
import torch
from several_threads import three_threads
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train.model.attention import Rotary
from tabicl_train.model.kernels import row_attention, row_cpu
from tabicl_train.model.kernels.row_attention import attend_rows

RUNS = [[(5, 3), (9, 7), (1, 1)], [(8, 9)], [(16, 4), (3, 54)], [(2, 128)]]


def arguments(runs, heads, d, interleaved=False, queries=None, dtype=torch.float32):
    """Arguments of attend_rows; with `queries`, cross-attention of that many queries of each row."""
    generator = torch.Generator().manual_seed(0)
    runs = torch.tensor(runs)
    lengths = torch.cat([torch.full((int(rows),), int(tokens)) for rows, tokens in runs])
    tokens = int(lengths.sum())
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    rotation = Rotary(d, 100.0, interleaved)(int(lengths.max()))
    parts = 3 if queries is None else 2
    kv = torch.randn(tokens, parts, heads, d, generator=generator, dtype=dtype)
    if queries is None:
        return kv, None, runs, starts, *rotation, interleaved
    q = torch.randn(len(lengths) * queries, 1, heads, d, generator=generator, dtype=dtype)
    return q, kv, runs, starts, *rotation, interleaved


def row_by_row(q, kv, runs, starts, cos, sin, interleaved):
    """The same by the formula, one row at a time, in the dtype of q."""
    out, rows, half = [], len(starts) - 1, q.shape[-1] // 2

    def turn(x):  # (T, H, d)
        partner = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else x.roll(half, -1)
        return x * cos[: len(x), None].to(x.dtype) + partner * sin[: len(x), None].to(x.dtype)

    for row in range(rows):
        first, last = starts[row], starts[row + 1]
        keys = (q if kv is None else kv)[first:last]
        queries = q[first:last, :1] if kv is None else q.view(rows, -1, *q.shape[1:])[row]
        turned = [turn(x) for x in (queries[:, 0], keys[:, -2])]
        weights = (torch.einsum("lhd,khd->hlk", *turned) / q.shape[-1] ** 0.5).softmax(-1)
        out.append(torch.einsum("hlk,khd->lhd", weights, keys[:, -1]))
    return torch.cat(out)


def results(function, q, kv, *rest):
    """The output and the gradients for a fixed gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in (q, kv) if x is not None]
    out = function(inputs[0], inputs[1] if kv is not None else None, *rest)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


def assert_equals_formula(arguments, tolerance):
    q, kv, *rest = arguments
    exact = results(row_by_row, q.double(), None if kv is None else kv.double(), *rest)
    for value, expected in zip(results(attend_rows, *arguments), exact, strict=True):
        assert (value - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("heads, d", [(4, 8), (2, 16)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("queries", [None, 1, 4])
def test_compiled_kernel_equals_the_formula(runs, heads, d, interleaved, queries):
    if queries is not None:
        runs = [(rows, max(tokens, queries)) for rows, tokens in runs]
    values = arguments(runs, heads, d, interleaved, queries)
    assert row_attention._fits_lanes(values[0], values[4])
    assert_equals_formula(values, 3e-6)


@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("dtype, d, tokens", [(torch.float64, 8, 5), (torch.float32, 6, 5), (torch.float32, 8, 130)])
def test_plain_path_equals_the_formula(dtype, d, tokens, queries, monkeypatch):
    monkeypatch.setattr(row_attention, "PLAIN_SCORES", 3 * 5 * 5)  # several pieces
    values = arguments([(4, tokens), (3, 2)], 3, d, True, queries, dtype)
    assert not row_attention._fits_lanes(values[0], values[4])
    assert_equals_formula(values, 1e-12 if dtype == torch.float64 else 3e-6)


def test_large_scores_neither_overflow_nor_lose_the_largest():
    q, *rest = arguments([(9, 5)], 1, 8)
    q[:, 1] *= 1000.0
    out = attend_rows(q, *rest)
    assert out.isfinite().all()
    torch.testing.assert_close(out, row_by_row(q.double(), *rest).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_queries_that_are_not_finite_show_in_their_own_results_alone(bad):
    q, *rest = arguments([(9, 5)], 2, 8)
    q[7, 0, 1, 2] = bad
    finite = torch.ones(45, 2, dtype=torch.bool)
    finite[7, 1] = False
    assert torch.equal(attend_rows(q, *rest).isfinite(), finite[..., None].expand(-1, -1, 8))


@pytest.mark.parametrize("queries", [None, 2])
def test_threads_do_not_change_a_bit(queries, monkeypatch):
    values = arguments([(50, 9), (21, 4)], 4, 8, queries=queries)
    one = results(attend_rows, *values)
    with three_threads(monkeypatch):
        several = results(attend_rows, *values)
    assert all(map(torch.equal, one, several))


def test_packed_projection_may_be_a_view():
    q, *rest = arguments([(9, 5)], 2, 8)
    wide = torch.cat([q, q], -1)
    for value, expected in zip(results(attend_rows, wide[..., :8], *rest), results(attend_rows, q, *rest), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("d", [6, 8])
def test_it_is_a_sound_operation_of_torch(queries, d):
    q, kv, *rest = arguments([(9, 5), (2, 3)], 2, d, queries=queries)
    inputs = (q.requires_grad_(), kv if kv is None else kv.requires_grad_(), *rest)
    torch.library.opcheck(torch.ops.tabicl_train.attend_rows, inputs)


@pytest.mark.slow
def test_compiled_graphs_hold_it_with_symbolic_sizes():
    compiled = torch.compile(attend_rows, fullgraph=True, dynamic=True, backend="aot_eager")
    for runs in ([(9, 5), (2, 3)], [(4, 7), (12, 6)]):
        values = arguments(runs, 2, 8)
        for value, expected in zip(results(compiled, *values), results(attend_rows, *values), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("queries, flops", [(None, 4 * 2 * 8 * (9 * 25 + 2 * 9)), (2, 4 * 2 * 8 * 2 * (9 * 5 + 2 * 3))])
def test_flops_are_counted(queries, flops):
    values = arguments([(9, 5), (2, 3)], 2, 8, queries=queries)
    with FlopCounterMode(display=False) as counter:
        results(attend_rows, *values)
    assert counter.get_total_flops() == 3 * flops


@pytest.mark.multi_process
def test_importing_the_network_imports_no_compiler():
    code = "import sys, tabicl_train.model.kernels.row_attention; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_partners_are_those_of_the_rotation():
    assert row_cpu.partners(4, True).tolist() == [1, 0, 3, 2]
    assert row_cpu.partners(4, False).tolist() == [2, 3, 0, 1]
