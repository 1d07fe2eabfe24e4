"""Attention within sequences, its limits, and rotary embedding, against formulas in float64."""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tabicl_train.model import attention
from tabicl_train.model.attention import Attention, Rotary, RowSpans, attend, attend_in_rows, batch_limit
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.pack import Spans, column_layout, within_rows


def softmax_attention(q, k, v):
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


# sequences, queries and keys of each, first key, table; the keys of the second half are those of the first
RUNS = [(3, 5, 4, 0, 0), (1, 7, 2, 12, 1), (3, 2, 4, 0, 0), (1, 1, 2, 12, 2)]


TABLES = [(9, 5, 2), (9, 5, 1), (12, 4, 3)]  # rows, labeled rows, groups


def expected_attention(q, kv, runs):
    """One sequence after the other."""
    outs, start = [], 0
    for count, length, keys, first, table in runs:
        for i in range(count):
            own = q[start : start + length] if q.dim() == 3 else q[table]  # (L, H, d)
            k, v = kv[first + i * keys : first + (i + 1) * keys].unbind(1)
            outs.append(softmax_attention(*(x.transpose(0, 1) for x in (own, k, v))).transpose(0, 1))
            start += length
    return torch.cat(outs)


def spans_of(runs, uses=1):
    queries = sum(count * length for count, length, *_ in runs)
    return Spans(torch.tensor(runs), queries, torch.zeros(1), torch.zeros(1), 0, 0, uses)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_attention_within_sequences(shared, products, exported, monkeypatch):
    monkeypatch.setattr(attention, "MIN_SCORES", 0 if products else 2**40)
    torch.manual_seed(0)
    runs = [(count, 3 if shared else length, *rest) for count, length, *rest in RUNS]
    spans = spans_of(runs, 2)
    if exported:
        spans = spans._replace(runs=spans.runs.tolist())
    q = torch.randn(3, 3, 2, 8) if shared else torch.randn(spans.queries, 2, 8)
    leaves = [q.requires_grad_(), torch.randn(14, 2, 2, 8, requires_grad=True)]
    weights = torch.randn(spans.queries, 2, 8)
    out = attend(q, *leaves[1].unbind(1), spans)
    (out * weights).sum().backward()
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = expected_attention(*exact_leaves, runs)
    (exact * weights).sum().backward()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6)
    for a, b in zip(leaves, exact_leaves, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("keys", [9, 40])
@pytest.mark.parametrize("extreme", [float("nan"), 1e4])
def test_extreme_queries_change_no_other_result(extreme, keys):
    """On both paths: large scores neither overflow nor lose the largest, and NaN stays where it is."""
    torch.manual_seed(0)
    q, kv, runs = torch.randn(18, 2, 8), torch.randn(2 * keys, 2, 2, 8), [(2, 9, keys, 0, 0)]
    q[3, 1] *= extreme
    found, expected = attend(q, *kv.unbind(1), spans_of(runs)).double(), expected_attention(q, kv, runs)
    if math.isnan(extreme):
        found[3, 1], expected[3, 1] = 0, 0  # torch's kernel hides it; the residual of the block shows it
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "heads, queries, head_dim, expected",
    [
        (8, 54, 16, 65_535),  # row attention: the launch grid; the backward bound alone would allow 65,536
        (8, 1024, 16, 8192),
        (8, 1024, 64, 4096),
        (8, 1025, 64, 3640),  # rows are counted in blocks of 128
        (8, 10_240, 16, 819),
        (8, 60_000, 64, 69),
        (8, 60_000_000, 64, 1),
    ],
)
def test_batch_limit(heads, queries, head_dim, expected):
    limit = batch_limit(heads, queries, head_dim)
    assert limit == expected
    index = heads * math.ceil(queries / 128) * 128 * max(head_dim, 32)
    assert limit == 1 or limit * index <= 2**31


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_turns_pairs_by_position(interleaved):
    """In self-attention and with the first tokens of a row as queries, in rows of 3 and 9 tokens."""
    torch.manual_seed(0)
    H, D, base, C = 3, 8, 1000.0, 2
    qkv = torch.randn(30, 3, H, D)
    ends = torch.tensor([0, 3, 6, 9, 12, 21, 30], dtype=torch.int32)
    within = within_rows([[4, 3], [2, 9]], ends, C)
    turns = tuple(x[within.position][:, None] for x in Rotary(D, base, interleaved)(9))
    of_cls = tuple(x[within.cls] for x in turns)
    found = (
        attend_in_rows(qkv, None, RowSpans(within.every, turns, turns, interleaved), 0.0),
        attend_in_rows(qkv[within.cls, 0], qkv[:, 1:], RowSpans(within.collecting, of_cls, turns, interleaved), 0.0),
    )
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + D // 2) for i in range(D // 2)]
    expected = []
    for start, end in itertools.pairwise(ends.tolist()):
        turned = qkv[start:end].double().clone()  # (T, 3, H, D)
        for i, (a, b) in enumerate(pairs):
            angle = torch.arange(end - start).double()[:, None, None] * base ** (-2 * i / D)
            z = torch.complex(turned[:, :2, :, a], turned[:, :2, :, b]) * torch.exp(1j * angle)
            turned[:, :2, :, a], turned[:, :2, :, b] = z.real, z.imag
        expected.append(softmax_attention(*turned.permute(1, 2, 0, 3)).transpose(0, 1))  # (T, H, D)
    first = torch.cat([torch.arange(start, start + C) for start in ends[:-1].tolist()])
    assert torch.equal(within.cls, first)
    expected = torch.cat(expected)
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[first], rtol=0, atol=1e-5)


def test_attention_in_fp32_ignores_autocast():
    torch.manual_seed(0)
    plain = Attention(16, 2, "qassmax_elementwise", TabICLConfig())
    exact = Attention(16, 2, "qassmax_elementwise", TabICLConfig(), fp32=True)
    exact.load_state_dict(plain.state_dict())
    x, table = torch.randn(21, 16), torch.zeros(21, dtype=torch.int64)
    rest = spans_of([(3, 7, 7, 0, 0)]), torch.tensor([2.0]), table
    expected = plain(x, x, *rest)
    with torch.autocast("cpu", torch.bfloat16):
        low, high = plain(x, x, *rest), exact(x, x, *rest)
        from_low = exact(x.bfloat16(), x.bfloat16(), *rest)
    assert low.dtype == high.dtype == from_low.dtype == torch.bfloat16  # as the tokens to which it is added
    assert torch.equal(high, expected.bfloat16()) and not torch.equal(low, high)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("grid", "elements"), [(65_535, 2**31), (2, 2**31), (65_535, 32 * 2 * 2 * (128 + 12)), (1, 1)])
def test_more_sequences_than_a_launch_takes_are_divided_at_their_boundaries(grid, elements, shared, monkeypatch):
    """On the branch of CUDA; in place of the kernel, one sequence after the other by the ends that it is given."""
    generator = torch.Generator().manual_seed(0)
    columns = column_layout(torch.tensor(TABLES), TABLES, 3)
    spans = columns.to_inducing if shared else columns.from_inducing
    q = torch.randn(*((len(TABLES), 3) if shared else (spans.queries,)), 2, 8, generator=generator)
    if shared:
        q[1] = q[0]  # as the tables have the same number of labeled rows
    k, v = torch.randn(2, columns.labeled if shared else 3 * len(columns.table), 2, 8, generator=generator)
    expected = attend(q, k, v, spans)
    sizes = []

    def kernel(q, k, v, query_ends, key_ends, most_queries, most_keys):
        sizes.append(len(query_ends) - 1)
        assert len(q) == query_ends[-1]
        assert len(k) == len(v) == key_ends[-1]
        assert query_ends[0] == key_ends[0] == 0
        assert len(query_ends) == len(key_ends)
        assert most_queries >= query_ends.diff().max()
        bounds = zip(query_ends[:-1], query_ends[1:], key_ends[:-1], key_ends[1:], strict=True)
        parts = [(q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1)) for a, b, c, d in bounds]
        return torch.cat([softmax_attention(*part).transpose(0, 1).float() for part in parts])

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention, "launch", kernel)
    monkeypatch.setattr(attention, "CUDA_GRID", grid)
    monkeypatch.setattr(attention, "FLASH_BACKWARD", elements)
    torch.testing.assert_close(attend(q, k, v, spans), expected)
    assert sum(sizes) == len(spans.query_ends) - 1 and max(sizes) <= grid
    assert (len(sizes) > 1) == (min(grid, elements) < 65_535)


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that are called, also in the backward pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
@pytest.mark.parametrize(("queries", "head_dim"), [(7, 16), (128, 16), (129, 64), (60_000, 64)])
def test_no_other_attention_runs_on_cuda_than_the_one_that_was_chosen(queries, head_dim, dtype, kernel):
    """On tensors without values: torch's own attention for various lengths would take cuDNN from 129 queries on."""
    with FakeTensorMode(), Operators() as operators:
        q = torch.empty(3 * queries, 2, head_dim, dtype=dtype, requires_grad=True)
        kv = torch.empty(30, 2, 2, head_dim, dtype=dtype, requires_grad=True)
        ends = torch.empty(4, dtype=torch.int32)
        out = attention.launch(q, *kv.unbind(1), ends, ends, queries, 10)
        gradients = torch.autograd.grad(out, (q, kv), torch.empty_like(out))
    assert [x.shape for x in (out, *gradients)] == [q.shape, q.shape, kv.shape]
    found = [name for name in operators.names if "attention" in name or "attn" in name]
    assert found == [f"aten._{kernel}_attention_forward.default", f"aten._{kernel}_attention_backward.default"]
