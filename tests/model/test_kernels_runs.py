"""Attention of many sequences on the CPU: against float64 softmax, and as an operation of torch."""

import pytest
import torch
from several_threads import three_threads
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train.model.kernels.run_attention import attend_runs

# sequences, queries and keys of each, first key, table
APART = [[3, 70, 16, 0, 0], [1, 5, 9, 48, 1], [2, 1, 1, 57, 2]]
USED_TWICE = [[2, 33, 130, 0, 0], [1, 8, 300, 260, 0], [2, 7, 130, 0, 0], [1, 64, 300, 260, 0]]
SHARED = [[3, 20, 33, 0, 1], [2, 20, 4, 99, 0]]


def arguments(runs, heads, d, shared=0, dtype=torch.float32):
    """Arguments of attend_runs; shared: the number of tables whose sequences share their queries, or 0."""
    generator = torch.Generator().manual_seed(0)
    queries = sum(count * length for count, length, *_ in runs)
    keys = max(first + count * size for count, _, size, first, _ in runs)
    shape = (shared, runs[0][1], heads, d) if shared else (queries, heads, d)
    q = torch.randn(shape, generator=generator, dtype=dtype)
    return q, torch.randn(keys, 2, heads, d, generator=generator, dtype=dtype), torch.tensor(runs), queries


def one_by_one(q, kv, runs, queries):
    """The same by the formula, one sequence at a time."""
    out, start = [], 0
    for count, length, size, first, table in runs.tolist():
        for sequence in range(count):
            own = q[start : start + length] if q.dim() == 3 else q[table if len(q) > 1 else 0]
            k, v = kv[first + sequence * size :][:size].unbind(1)
            weights = (torch.einsum("lhd,khd->hlk", own, k) / q.shape[-1] ** 0.5).softmax(-1)
            out.append(torch.einsum("hlk,khd->lhd", weights, v))
            start += length
    return torch.cat(out)


def results(function, q, kv, *rest):
    """The output and the gradients for a fixed gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in (q, kv)]
    out = function(*inputs, *rest)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


def assert_equals_formula(values, tolerance):
    q, kv, *rest = values
    exact = results(one_by_one, q.double(), kv.double(), *rest)
    for value, expected in zip(results(attend_runs, *values), exact, strict=True):
        assert (value - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("heads, d", [(4, 8), (2, 16), (3, 64)])
@pytest.mark.parametrize("runs, shared", [(APART, 0), (USED_TWICE, 0), (SHARED, 2), (SHARED, 1)])
def test_compiled_kernel_equals_the_formula(runs, shared, heads, d):
    assert_equals_formula(arguments(runs, heads, d, shared), 3e-6)


@pytest.mark.parametrize("runs, shared", [(APART, 0), (USED_TWICE, 0), (SHARED, 2), (SHARED, 1)])
@pytest.mark.parametrize("dtype, d", [(torch.float64, 8), (torch.float32, 6)])
def test_plain_path_equals_the_formula(runs, shared, dtype, d):
    assert_equals_formula(arguments(runs, 3, d, shared, dtype), 1e-12 if dtype == torch.float64 else 3e-6)


def test_large_scores_neither_overflow_nor_lose_the_largest():
    q, kv, *rest = arguments([[1, 9, 300, 0, 0]], 1, 8)
    kv[:, 0] *= 1000.0
    out, *gradients = results(attend_runs, q, kv, *rest)
    torch.testing.assert_close(out, one_by_one(q.double(), kv.double(), *rest).float(), rtol=1e-3, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("keys", [1, 300])
def test_queries_that_are_not_finite_show_in_their_own_results_alone(keys, bad):
    q, kv, *rest = arguments([[2, 9, keys, 0, 0]], 2, 8)
    q[3, 1, 2] = bad
    finite = torch.ones(18, 2, dtype=torch.bool)
    finite[3, 1] = False
    assert torch.equal(attend_runs(q, kv, *rest).isfinite(), finite[..., None].expand(-1, -1, 8))


@pytest.mark.parametrize("runs, shared", [(USED_TWICE, 0), (SHARED, 2)])
def test_threads_do_not_change_a_bit(runs, shared, monkeypatch):
    values = arguments(runs, 4, 8, shared)
    one = results(attend_runs, *values)
    with three_threads(monkeypatch):
        several = results(attend_runs, *values)
    assert all(map(torch.equal, one, several))


@pytest.mark.parametrize("d", [6, 8])
@pytest.mark.parametrize("shared", [0, 2])
def test_it_is_a_sound_operation_of_torch(d, shared):
    q, kv, *rest = arguments(SHARED, 2, d, shared)
    torch.library.opcheck(torch.ops.tabicl_train.run_attention, (q.requires_grad_(), kv.requires_grad_(), *rest))


def test_flops_are_counted():
    values = arguments(SHARED, 2, 8, 2)
    with FlopCounterMode(display=False) as counter:
        attend_runs(*values)
    assert counter.get_total_flops() == 4 * 2 * 8 * 20 * (3 * 33 + 2 * 4)
