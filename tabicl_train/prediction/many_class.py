"""More classes than the network was trained for, from many predictions among few classes (TabICLv2, arXiv 2602.11139).

At the input, labels are written in digits, and the column stage sees one digit at a time. At the output, the classes
form a tree, and the in-context learner chooses among the few children of each node.

N rows of which the first n are labeled, D row representation, C classes, each of which occurs among the labels.
"""

import itertools

import torch
from torch import Tensor

from tabicl_train.model.pack import context_layout, log_counts
from tabicl_train.model.tabicl import InContextLearner


def label_digits(y: Tensor, num_classes: int, most: int) -> list[Tensor]:
    """The digits of labels y, most significant first: as few digits below `most` as num_classes need.

    All digits have the same radix, the smallest possible: 57 classes need two digits below 8, and 42 is (5, 2).
    """
    places = next(k for k in itertools.count(1) if most**k >= num_classes)
    radix = next(r for r in itertools.count(1) if r**places >= num_classes)
    return [y // radix**place % radix for place in reversed(range(places))]


def split_classes(num_classes: int, most: int) -> list[int]:
    """Sizes of the groups of consecutive classes under a node: at most `most`, nearly equal, larger ones first."""
    groups = min(-(-num_classes // most), most)
    return [num_classes // groups + (group < num_classes % groups) for group in range(groups)]


def class_probabilities(
    learner: InContextLearner, rows: Tensor, y_train: Tensor, num_classes: int, temperature: float
) -> Tensor:
    """rows (N, D), y_train (n,) in 0..C-1 -> probabilities of the query rows (N - n, C).

    Each node predicts from its own labeled rows alone; probabilities are multiplied along the paths.
    """
    labeled, queries = rows[: len(y_train)], rows[len(y_train) :]
    most = learner.config.max_classes
    if num_classes == 1:
        return rows.new_ones(len(queries), 1)
    if num_classes <= most:
        shape = len(rows), len(y_train), 1
        table = torch.tensor([shape], device=rows.device)
        logits = learner(rows, y_train, context_layout(table, [shape]), log_counts(table))[:, :num_classes]
        return torch.softmax(logits / temperature, dim=-1)
    sizes = split_classes(num_classes, most)
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    group = torch.bucketize(y_train, torch.tensor(starts[1:], device=y_train.device), right=True)  # (n,)
    of_groups = class_probabilities(learner, rows, group, len(sizes), temperature)  # (N - n, groups)
    parts = []
    for child, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        own = group == child
        context = torch.cat([labeled[own], queries])
        within = class_probabilities(learner, context, y_train[own] - start, size, temperature)  # (N - n, size)
        parts.append(of_groups[:, child, None] * within)
    return torch.cat(parts, dim=1)
