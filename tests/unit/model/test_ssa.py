"""Scaled signed averaging against its formula in float64, in memory that is not quadratic, and within the network."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tabicl_train.config.compose import compose
from tabicl_train.model import TabICLConfig, averaging
from tabicl_train.model.attention import Attention, attend_ssa
from tabicl_train.model.averaging import attend_averaging, attend_plain
from tabicl_train.model.pack import Pack, Spans
from tabicl_train.model.scaling import SSA
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.precision import choose_precision

FINE = 1e-5  # relative

# sequences, queries and keys of each, first key, table
APART = [[3, 70, 16, 0, 0], [1, 5, 9, 48, 1], [2, 1, 1, 57, 2]]
USED_TWICE = [[2, 33, 130, 0, 0], [1, 8, 300, 260, 0], [2, 7, 130, 0, 0], [1, 64, 300, 260, 0]]
SHARED = [[3, 20, 33, 0, 1], [2, 20, 4, 99, 0]]


def averaging_layer(heads: int = 3, exponent: float = 1.5, trainable: bool = False) -> SSA:
    return SSA(heads, 8, TabICLConfig(ssa_exponent=exponent), trainable)


def attention(width: int, heads: int, rule: str, exponent: float) -> Attention:
    return Attention(width, heads, rule, TabICLConfig(ssa_exponent=exponent))


def one_by_one(q, kv, exponents, runs, queries):
    """By the formula of the weights, without logarithms, one sequence at a time."""
    out, start = [], 0
    for count, length, size, first, table in runs.tolist():
        for sequence in range(count):
            own = q[start : start + length] if q.dim() == 3 else q[table if len(q) > 1 else 0]
            k, v = kv[first + sequence * size :][:size].unbind(1)
            z = torch.einsum("lhd,khd->hlk", own, k) / q.shape[-1] ** 0.5
            weights = (1 + z.abs()) ** (z.sign() * exponents[:, None, None])
            out.append(torch.einsum("hlk,khd->lhd", weights / weights.sum(-1, keepdim=True), v))
            start += length
    return torch.cat(out)


def results(function, q, kv, exponents, *rest):
    """The output and the gradients for a fixed gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in (q, kv, exponents)]
    out = function(*inputs, *rest)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


def with_exponents(runs, heads, d, shared=0, dtype=torch.float32):
    """Arguments of attend_averaging, with scores of several units.

    shared: the number of tables whose sequences share their queries, or 0
    """
    generator = torch.Generator().manual_seed(0)
    queries = sum(count * length for count, length, *_ in runs)
    keys = max(first + count * size for count, _, size, first, _ in runs)
    shape = (shared, runs[0][1], heads, d) if shared else (queries, heads, d)
    q = 4 * torch.randn(shape, generator=generator, dtype=dtype)
    kv = torch.randn(keys, 2, heads, d, generator=generator, dtype=dtype)
    return q, kv, torch.linspace(1.1, 2, heads, dtype=dtype), torch.tensor(runs), queries


@pytest.mark.parametrize("scores", [1, 700, 2**18])
@pytest.mark.parametrize("runs, shared", [(APART, 0), (USED_TWICE, 0), (SHARED, 2), (SHARED, 1)])
@pytest.mark.parametrize("dtype, d", [(torch.float32, 5), (torch.float64, 8)])
def test_values_and_gradients_are_those_of_the_formula(runs, shared, dtype, d, scores, monkeypatch):
    """In chunks of few queries, of a part of the sequences, and of all of them."""
    monkeypatch.setitem(averaging.SCORES_OF_CHUNK, "cpu", scores)
    values = with_exponents(runs, 3, d, shared, dtype)
    exact = results(one_by_one, *(x.double() if x.is_floating_point() else x for x in values[:-1]), values[-1])
    for found, expected in zip(results(attend_averaging, *values), exact, strict=True):
        assert found.dtype == dtype
        assert (found - expected).norm() <= (1e-12 if dtype == torch.float64 else FINE) * expected.norm()


def test_half_precision_is_rounded_once():
    q, kv, *rest = with_exponents(USED_TWICE, 3, 8)
    q, kv = q.bfloat16(), kv.bfloat16()
    exact = results(attend_averaging, q.float(), kv.float(), *rest)
    for found, expected in zip(results(attend_averaging, q, kv, *rest), exact, strict=True):
        assert (found.float() - expected).norm() <= 2**-8 * expected.norm()


def test_all_scores_at_once_give_the_same():
    """As for export."""
    q, kv, exponents, *rest = with_exponents([[3, 20, 33, 0, 0]], 2, 16)

    def whole(q, kv, exponents, runs, queries):
        return attend_ssa(q, kv, Spans(runs.tolist(), queries, runs, runs, 20, 33), exponents)

    expected = results(attend_averaging, q, kv, exponents, *rest)
    for one, other in zip(results(whole, q, kv, exponents, *rest), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=FINE, atol=1e-5)


def test_a_score_of_zero_has_the_slope_one():
    q, k, v = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    exponents, kv = torch.tensor([1.5]), torch.stack([k, v], 2).view(1, 2, 3, 4).permute(2, 1, 0, 3)
    softmax = torch.func.grad(lambda q: (torch.softmax(1.5 * q @ k.mT / 2, -1) @ v).sum())(q)
    torch.testing.assert_close(torch.func.grad(lambda q: attend_plain(q, k, v, exponents).sum())(q), softmax)
    flat, run = q[0].transpose(0, 1).requires_grad_(), torch.tensor([[1, 2, 3, 0, 0]])
    (found,) = torch.autograd.grad(attend_averaging(flat, kv, exponents, run, 2).sum(), flat)
    torch.testing.assert_close(found.transpose(0, 1)[None], softmax)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_queries_compare_keys_by_the_power_of_their_ratio(size):
    """(b z1)^p / (b z2)^p, where softmax would see the largest key alone."""
    kv = torch.zeros(3, 2, 1, 8)
    kv[:, 0, 0, 0] = torch.tensor([3.0, 1.0, -2.0])
    kv[:, 1, 0, :3] = torch.eye(3)  # the output shows the weights
    q = torch.zeros(1, 1, 8)
    q[..., 0] = size
    run, exponents = torch.tensor([[1, 1, 3, 0, 0]]), torch.tensor([1.7])
    out, *gradients = results(attend_averaging, q, kv, exponents, run, 1)
    first, second, negative = out[0, 0, :3].tolist()
    assert first / second == pytest.approx(3**1.7, rel=1e-3) and negative < 1e-6
    assert all(gradient.isfinite().all() for gradient in gradients)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = [x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *found, 0)
        return out


def test_memory_does_not_grow_with_the_square_of_the_rows():
    for n in (1000, 3000):
        q, kv, exponents, runs, queries = with_exponents([[1, n, n, 0, 0]], 2, 8)
        with Largest() as forward:
            out = attend_averaging._init_fn(q, kv, exponents, runs, queries)
        with Largest() as backward:
            averaging.averaging_backward._init_fn(out, q, kv, exponents, runs, out)
        # with 3,000 rows there are 18 million scores
        assert max(forward.elements, backward.elements) <= max(averaging.SCORES_OF_CHUNK["cpu"], q.numel(), kv.numel())
        assert min(forward.elements, backward.elements) > n


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 2])
def test_it_is_a_sound_operation_of_torch(shared):
    q, kv, exponents, *rest = with_exponents(SHARED, 2, 8, shared)
    inputs = (x.requires_grad_() for x in (q, kv, exponents))
    torch.library.opcheck(torch.ops.tabicl_train.attend_averaging, (*inputs, *rest))


def test_parameters_start_as_documented_and_stay_in_range():
    fixed, trained = averaging_layer(), averaging_layer(exponent=1.25, trainable=True)
    assert {name for name, _ in fixed.named_parameters()} == {"log_b"}
    assert torch.equal(fixed.multipliers(9), torch.ones(3, 1))
    assert torch.equal(fixed.exponents(), torch.full((3,), 1.5))
    torch.testing.assert_close(trained.exponents(), torch.full((3,), 1.25))
    for value in (-60.0, 20.0):  # whatever training does
        with torch.no_grad():
            trained.log_b.fill_(value), trained.log_excess.fill_(value)
        assert (trained.multipliers(9) > 0).all()
        assert (trained.exponents() >= 1).all()


def test_the_factor_b_scales_scores_and_multiplies_queries():
    """With b and p, weights are (1 + b|z|)^(sgn(z) p): here from q and k, without the layer's own functions."""
    torch.manual_seed(0)
    layer = attention(8, 1, "ssa", 2.0)
    torch.nn.init.constant_(layer.ssmax_layer.log_b, math.log(5))
    x, spans = torch.randn(6, 8), Spans(torch.tensor([[1, 6, 6, 0, 0]]), 6, None, None, 0, 0)
    q, kv = layer.project(x, x)
    z = (q[:, 0] @ kv[:, 0, 0].T / math.sqrt(8)).double()
    weights = (1 + 5 * z.abs()) ** (2 * z.sign())
    expected = layer.out_proj((weights / weights.sum(-1, keepdim=True) @ kv[:, 1, 0].double()).float())
    found = layer(x, x, spans, None, torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(found, expected, rtol=FINE, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit_of_the_attention(dtype):
    q, kv, *rest = with_exponents(USED_TWICE, 3, 8)
    plain = results(attend_averaging, q.to(dtype), kv.to(dtype), *rest)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(attend_averaging, q.to(dtype), kv.to(dtype), *rest)
    assert all(map(torch.equal, found, plain))


def test_a_training_step_moves_the_exponent_that_is_learned():
    settings = ("model.icl_scaling=ssa_trainable", "model.col_scaling=ssa_trainable", "trainer.accelerator=cpu")
    config = compose(["experiment=smoke", *settings])
    parts = (config.model, config.curriculum, config.optimizer, choose_precision(config.trainer), config.seed)
    module = TrainedNetwork(*parts)
    layers = dict(module.model.named_scalings())
    before = {name: layer.exponents().detach() for name, layer in layers.items()}
    X = torch.randn(6, 30, 4, generator=torch.Generator().manual_seed(0))
    pack = Pack.of((x, (x[:, 0] > x[:, 1]).long(), 20) for x in X)
    optimizer = module.configure_optimizers()
    for step in range(2):  # the rate of step 0 is that of the warmup
        module.train_on(StepItem(step, "smoke", len(pack), [pack]), step, 0, optimizer)
    assert {name.split(".")[0] for name in layers} == {"column", "icl"}
    for name, layer in layers.items():
        assert layer.log_excess.grad.abs().max() > 0, name
        assert (layer.exponents() - before[name]).abs().min() > 1e-6, name
