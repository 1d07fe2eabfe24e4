"""Linear layers through oneDNN: against float64, and the cases in which F.linear takes over."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train.model.kernels import linear as module
from tabicl_train.model.kernels.linear import linear


@pytest.fixture(autouse=True)
def small_products_too(monkeypatch):
    monkeypatch.setattr(module, "ENOUGH", 1)


def draw(shape, outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    weight = torch.randn(outputs, shape[-1], generator=generator, dtype=dtype)
    return [value.requires_grad_() for value in (x, weight, torch.randn(outputs, generator=generator, dtype=dtype))]


def results(function, x, weight, bias):
    inputs = [value.detach().requires_grad_() for value in (x, weight, bias) if value is not None]
    out = function(*inputs)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, slope)]


@pytest.mark.parametrize("shape, outputs", [((50, 32), 96), ((3, 7, 128), 128), ((1, 4), 2), ((257, 512), 64)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_equal_those_in_float64(shape, outputs, with_bias):
    x, weight, bias = draw(shape, outputs)
    values = [x, weight, bias if with_bias else None]
    wide = [None if value is None else value.double() for value in values]
    for value, exact in zip(results(linear, *values), results(F.linear, *wide), strict=True):
        assert (value - exact).norm() <= 1e-6 * exact.norm()


def test_small_products_are_left_to_torch(monkeypatch):
    """Since oneDNN compiles code for each new size."""
    monkeypatch.setattr(module, "ENOUGH", 20 * 8 * 6)
    for rows, compiled in ((19, False), (20, True)):
        out = linear(*draw((rows, 8), 6))
        assert (out.grad_fn.name() == "_LinearBackward") == compiled


def test_views_are_taken():
    x, weight, bias = draw((20, 8), 6)
    torch.testing.assert_close(linear(x[::2, :4], weight[:, 4:], bias), F.linear(x[::2, :4], weight[:, 4:], bias))
    spread = torch.ones(()).expand(20, 6)  # the gradient of a sum, without memory of its own
    ours, plain = (torch.autograd.grad(f(x, weight, bias), x, spread)[0] for f in (linear, F.linear))
    torch.testing.assert_close(ours, plain)


def test_frozen_weights_get_no_gradient():
    x, weight, bias = draw((20, 8), 6)
    linear(x, weight.detach(), bias.detach()).sum().backward()
    assert x.grad is not None and weight.grad is None and bias.grad is None


def test_second_gradients_are_refused():
    x, weight, bias = draw((20, 8), 6)
    (slope,) = torch.autograd.grad(linear(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_results(dtype):
    values = draw((20, 8), 6, dtype)
    assert torch.equal(linear(*values), F.linear(*values))


def test_no_rows_and_autocast_keep_the_results_of_torch():
    x, weight, bias = draw((20, 8), 6)
    assert linear(x[:0], weight, bias).shape == (0, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_flops_are_those_of_the_plain_layer():
    totals = []
    for function in (linear, F.linear):
        with FlopCounterMode(display=False) as counter:
            results(function, *draw((20, 8), 6))
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] == 3 * 2 * 20 * 8 * 6


@pytest.mark.slow
def test_compiled_graphs_hold_it():
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (20, 31):
        values = draw((rows, 8), 6)
        for value, expected in zip(results(compiled, *values), results(linear, *values), strict=True):
            torch.testing.assert_close(value, expected)
