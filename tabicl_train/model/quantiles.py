"""The pinball loss of quantiles of a number, and the loss of predicting from labels alone.

N rows of which the first n are labeled, Q quantiles.
"""

import torch
from torch import Tensor

NUM_QUANTILES = 999  # of the labels, which predict without features; TabICLv2 predicts as many


def quantile_levels(num_quantiles: int, device: torch.device | None = None) -> Tensor:
    """Return the levels of quantiles, float32 (Q,), evenly spaced in (0, 1) without its ends."""
    return torch.arange(1, num_quantiles + 1, dtype=torch.float32, device=device) / (num_quantiles + 1)


def pinball(quantiles: Tensor, y: Tensor) -> Tensor:
    """Compute the pinball loss of each row, max(a (y - q), (a - 1) (y - q)), averaged over the levels a.

    Parameters
    ----------
    quantiles : Tensor
        Predicted quantiles q, (rows, Q).
    y : Tensor
        Targets, (rows,).

    Returns
    -------
    Tensor
        float32 (rows,) in any precision.
    """
    return PinballFunction.apply(quantiles, y)


class PinballFunction(torch.autograd.Function):
    """Keeps only the quantiles for the backward pass; in parts of rows, as fp32 takes four times the memory of bf16."""

    PART = 2**20  # values, 4 MB in fp32

    @staticmethod
    def forward(ctx, quantiles: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(quantiles, y)
        a = quantile_levels(quantiles.shape[1], y.device)
        size = max(1, PinballFunction.PART // len(a))
        losses = []
        for q, targets in zip(quantiles.split(size), y[:, None].split(size), strict=True):
            losses.append(slopes(q > targets, a).mul_(q - targets).mean(1))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        quantiles, y = ctx.saved_tensors
        a = quantile_levels(quantiles.shape[1], y.device)
        size = max(1, PinballFunction.PART // len(a))
        grad_of_quantiles = torch.empty_like(quantiles)
        weights = grad[:, None] / len(a)  # (rows, 1)
        parts = (x.split(size) for x in (grad_of_quantiles, quantiles, y[:, None], weights))
        for grad_of_q, q, targets, weight in zip(*parts, strict=True):
            # Rounded at the end, as 0.999 is 1 in bf16.
            grad_of_q.copy_(slopes(q > targets, a).mul_(weight))
        return grad_of_quantiles, None


def slopes(above: Tensor, a: Tensor) -> Tensor:
    """Return the derivatives of the pinball loss by quantiles: 1 - a above the target, else -a, (rows, Q) float32."""
    return torch.where(above, 1 - a, -a)


def guess_loss(y: Tensor, train_size: int) -> float:
    """Compute the loss of predicting the query rows of a table from its labels alone; y (N,) on the CPU.

    In a table of C classes, a class with n_c of the n labeled rows gets the probability (n_c + 1) / (n + C), which is
    positive even for a class that only query rows have. Numbers are predicted by the quantiles of the labels.
    """
    labeled, queries = y[:train_size], y[train_size:]
    if y.is_floating_point():
        return marginal_pinball(labeled.double(), queries.double())
    counts = labeled.bincount(minlength=int(y.max()) + 1)
    p = (counts + 1) / (train_size + len(y.unique()))
    return -p.log()[queries].mean().item()


def marginal_pinball(labeled: Tensor, queries: Tensor) -> float:
    """Compute the mean pinball loss of the quantiles of labeled numbers (n,) for queries (N - n,), in float64."""
    # Sums over the quantiles below and above each query avoid a matrix of quantiles and queries: 12 million values for
    # a table of stage 3, and 64 such tables in a step.
    a = quantile_levels(NUM_QUANTILES).double()
    q = labeled.quantile(a)  # (Q,), ascending
    below = torch.searchsorted(q, queries)  # (N - n,), how many
    # Loss of a query y, with sums over the quantiles below it and over the rest:
    #   sum of a (y - q) below + sum of (1 - a) (q - y) above
    weight = sums_of_first(a)[below]
    weighted = sums_of_first(a * q)[below]
    sums = sums_of_first(1 - a)
    rest = sums[-1] - sums[below]
    weighted_sums = sums_of_first((1 - a) * q)
    rest_weighted = weighted_sums[-1] - weighted_sums[below]
    losses = queries * weight - weighted + rest_weighted - queries * rest
    return losses.mean().item() / len(a)


def sums_of_first(x: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, 2, ... values of x (Q,), (Q + 1,)."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])
