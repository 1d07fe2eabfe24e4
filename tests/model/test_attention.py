"""Attention in chunks, its limits, and rotary embedding, against formulas in float64."""

import math

import pytest
import torch

from tabicl_train.model.attention import Attention, Rotary, attend, batch_limit


def softmax_attention(q, k, v):
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_attend_in_chunks(limit, shared):
    torch.manual_seed(0)
    B, H, L, K, D = 7, 2, 3, 5, 4
    q = torch.randn(1 if shared else B, H, L, D).expand(B, -1, -1, -1)
    k, v = torch.randn(2, B, H, K, D)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, limit=limit)
    out.square().sum().backward()
    exact_leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    exact = softmax_attention(*exact_leaves)
    exact.square().sum().backward()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6)
    for a, b in zip(leaves, exact_leaves, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=1e-5)


def test_attend_never_exceeds_its_limit(monkeypatch):
    batches = []

    def spy(q, k, v, dropout_p):
        batches.append(len(q))
        return softmax_attention(q, k, v)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spy)
    attend(*torch.randn(3, 10, 2, 3, 4), limit=4)
    assert batches == [4, 4, 2]


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
    torch.manual_seed(0)
    B, L, H, D, base = 2, 9, 3, 8, 1000.0
    x = torch.randn(B, L, H, D)
    turned = Rotary(D, base, interleaved)(L + 4).turn(x)  # tables may be longer than x
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + D // 2) for i in range(D // 2)]
    for i, (a, b) in enumerate(pairs):
        angle = torch.arange(L).double()[:, None] * base ** (-2 * i / D)  # (L, 1)
        z = torch.complex(x[..., a].double(), x[..., b].double()) * torch.exp(1j * angle)
        torch.testing.assert_close(turned[..., a].double(), z.real, rtol=0, atol=1e-5)
        torch.testing.assert_close(turned[..., b].double(), z.imag, rtol=0, atol=1e-5)


def test_attention_in_fp32_ignores_autocast():
    torch.manual_seed(0)
    plain = Attention(16, 2, "qassmax_elementwise", 0.0, False)
    exact = Attention(16, 2, "qassmax_elementwise", 0.0, False, fp32=True)
    exact.load_state_dict(plain.state_dict())
    x, log_n = torch.randn(3, 7, 16), torch.tensor([2.0])
    expected = plain(x, log_n=log_n)
    with torch.autocast("cpu", torch.bfloat16):
        low, high = plain(x, log_n=log_n), exact(x, log_n=log_n)
        from_low = exact(x[:1].bfloat16(), x.bfloat16(), log_n=log_n)
    assert low.dtype == torch.bfloat16 and high.dtype == from_low.dtype == torch.float32
    assert torch.equal(high, expected) and not torch.equal(low.float(), expected)
