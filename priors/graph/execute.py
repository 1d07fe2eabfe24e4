"""Computing a planned table, node by node."""

from __future__ import annotations

import torch

from priors.finish import Rejected
from priors.graph.activations import normalise
from priors.graph.converters import Numeric, convert_numeric
from priors.graph.noise import Noise
from priors.graph.plan import TARGET, GraphPlan, Node


def execute_plan(plan: GraphPlan, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Raw columns float32 (num_rows, num_features), labels int64 (num_rows,); Rejected where no split can be found."""
    noise = Noise((plan.address, "execute"), device)
    features = torch.empty(plan.num_features, plan.num_rows, device=noise.device)
    labels = torch.empty(0)
    last_reader = {parent: node.index for node in plan.nodes for parent in node.parents}
    values: dict[int, torch.Tensor] = {}
    for node in plan.nodes:
        x = scale(compute_node(node, values, plan.num_rows, noise), node, noise)
        if len(columns := node.columns):
            numeric = [column for column in columns if isinstance(column.converter, Numeric)]
            if numeric:
                k = len(numeric)
                raw, flow = convert_numeric(x[:k], [column.converter for column in numeric], noise)
                features[[column.index for column in numeric]] = raw
                x[:k] = flow
            start = len(numeric)
            for column in columns[start:]:
                part = x[start : start + column.converter.width]
                category, flow = column.converter(part, noise)
                if column.index == TARGET:
                    labels = category
                    check_classes(labels)
                else:
                    features[column.index] = category
                if flow is not part:
                    x[start : start + len(part)] = flow
                start += len(part)
        if node.noise:
            x += noise.normal(*x.shape).mul_(node.noise)
        x *= node.importance
        values[node.index] = x
        for parent in node.parents:
            if last_reader[parent] == node.index:
                del values[parent]
    return features.T, labels


def check_classes(labels: torch.Tensor) -> None:
    """Raise Rejected("split") where no order of the rows has the same classes, two or more, in both parts."""
    counts = labels.bincount()
    counts = counts[counts > 0]
    if len(counts) < 2 or counts.min() < 2:
        raise Rejected("split")


def compute_node(node: Node, values: dict[int, torch.Tensor], num_rows: int, noise: Noise) -> torch.Tensor:
    """(width, N): random points, or the node's functions of its parents' values."""
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
    match how:
        case "sum":
            return a + b
        case "product":
            return a * b
        case "max":
            return torch.maximum(a, b)
    return torch.logaddexp(a, b)


def scale(x: torch.Tensor, node: Node, noise: Noise) -> torch.Tensor:
    """Standardised features times random weights, over the root mean square of the rows' L2 norms."""
    x, factors = normalise(x)
    factors = factors * noise.tensor(node.weights.compute(noise.rng)[0][:, None])
    return x.mul_(factors.div_(factors.norm().add_(1e-8)))  # x has deviation 1: the factors' norm is that of the rows
