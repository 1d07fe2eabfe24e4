"""From a plan to the raw columns of a table, node by node (TabICLv2, arXiv 2602.11139, appendix)."""

from __future__ import annotations

import numpy as np
import torch

from priors.finish import Rejected
from priors.graph.activations import normalize
from priors.graph.converters import Numeric, convert_numeric
from priors.graph.noise import Noise
from priors.graph.plan import TARGET, GraphPlan, Node


def execute_plan(plan: GraphPlan, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Raw columns float32 (num_rows, num_features) and labels int64 or, for a numeric target, float32 (num_rows,).

    Raises Rejected("split") if labeled and query rows cannot hold the same classes.
    """
    noise = Noise((plan.address, "execute"), device)
    numeric_target = plan.num_classes == 0
    # A numeric target is the last column: its index, -1, modulo their number.
    columns = torch.empty(plan.num_features + numeric_target, plan.num_rows, device=noise.device)
    labels = torch.empty(0)
    last_reader = {parent: node.index for node in plan.nodes for parent in node.parents}
    values: dict[int, torch.Tensor] = {}
    for node in plan.nodes:
        x = scale(compute_node(node, values, plan.num_rows, noise), node, noise)  # (width, N)
        if node.columns:
            numeric = [column for column in node.columns if isinstance(column.converter, Numeric)]
            if numeric:
                part = x[: len(numeric)]
                raw, flow = convert_numeric(part, [column.converter for column in numeric], noise)
                indices = np.array([column.index % len(columns) for column in numeric])
                columns.index_copy_(0, noise.tensor(indices), raw)
                if flow is not part:
                    part.copy_(flow)
            start = len(numeric)
            for column in node.columns[start:]:
                part = x[start : start + column.converter.width]
                category, flow = column.converter(part, noise)
                if column.index == TARGET:
                    labels = category
                    check_classes(labels)
                else:
                    columns[column.index].copy_(category)
                if flow is not part:
                    part.copy_(flow)
                start += column.converter.width
        if node.noise:
            x += noise.normal(*x.shape).mul_(node.noise)
        x.mul_(node.importance)
        values[node.index] = x
        for parent in node.parents:
            if last_reader[parent] == node.index:
                del values[parent]
    return (columns[:-1].T, columns[-1]) if numeric_target else (columns.T, labels)


def check_classes(labels: torch.Tensor) -> None:
    """Raise Rejected("split") unless some order of the rows has the same classes, two or more, in both parts."""
    counts = np.bincount(labels.cpu().numpy())
    counts = counts[counts > 0]
    if len(counts) < 2 or counts.min() < 2:
        raise Rejected("split")


def compute_node(node: Node, values: dict[int, torch.Tensor], num_rows: int, noise: Noise) -> torch.Tensor:
    """The node's values before scaling, (width, N): random points, or functions of its parents' values."""
    if node.points:
        return node.points.compute(num_rows, noise)
    if node.combine == "concat":
        return node.functions[0](torch.cat([values[parent] for parent in node.parents]), noise)
    out = None
    for parent, function in node.edges():
        y = function(values[parent], noise)
        out = y if out is None else combine(node.combine, out, y)
    return out


def combine(how: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Aggregate the outputs of two parents' functions."""
    match how:
        case "sum":
            return a + b
        case "product":
            return a * b
        case "max":
            return torch.maximum(a, b)
    if a.is_cuda:
        return torch.logaddexp(a, b)
    from priors.graph.featurewise import logsumexp

    out = torch.empty_like(a)
    logsumexp(a.numpy(), b.numpy(), out.numpy())
    return out


def scale(x: torch.Tensor, node: Node, noise: Noise) -> torch.Tensor:
    """Standardized features of x (width, N) times random weights, over the root mean square of the rows' L2 norms.

    Overwrites x on the CPU.
    """
    weights = node.weights.compute(noise.rng)[0]
    if not x.is_cuda:
        from priors.graph.featurewise import scale_features

        scale_features(x.numpy(), weights)
        return x
    x, factors = normalize(x)
    factors = factors * noise.tensor(weights[:, None])
    # As every feature has deviation 1, the norm of the factors is the root mean square of the rows' norms.
    return x.mul_(factors.div_(factors.norm().add_(1e-8)))
