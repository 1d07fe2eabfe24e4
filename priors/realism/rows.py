"""Class imbalance, duplicates, and a shift between labeled and query rows of a raw table."""

from __future__ import annotations

import numpy as np
import torch

from priors.finish import SPLIT_ATTEMPTS, Rejected, clamp_and_standardize, is_valid_split
from priors.realism.raw import Raw, ranks

DRAWN_ROWS = 2  # times the rows of the table, of which imbalance keeps some
DEPTHS = (1.0, 4.0)  # of the classes' log weights: that of the commonest minus that of the rarest, by strength
KEPT_CLASS_ROWS = 4  # of each class at least, as otherwise most draws would have no valid split
COPIED_SHARES = (0.02, 0.4)  # of the rows
SLOPES = (1.0, 10.0)  # of the log weight of becoming a query row, from the lowest rank to the highest
DIRECTION_COLUMNS = 5  # of a direction, at most


def unbalance(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Keep num_rows of the rows, so that rare classes become rarer."""
    depth = DEPTHS[0] + (DEPTHS[1] - DEPTHS[0]) * strength
    places = np.sort(rng.random(raw.num_classes))
    log_weights = np.empty(raw.num_classes)
    by_size = np.argsort(np.bincount(raw.target, minlength=raw.num_classes))
    log_weights[by_size] = depth * (places - places[-1]) / np.ptp(places)
    keys = log_weights[raw.target] + rng.gumbel(size=len(raw.target))  # the largest ones: a draw without replacement
    for label in range(raw.num_classes):
        keys[np.flatnonzero(raw.target == label)[:KEPT_CLASS_ROWS]] = np.inf
    raw.take(np.sort(np.argpartition(-keys, raw.num_rows)[: raw.num_rows]))
    return f"rows kept by class in the ratio {', '.join(f'{w:.2g}' for w in np.exp(log_weights))}"


def duplicate(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Put copies of other rows in the place of some, with the target; part of them with one value changed."""
    rows, features = raw.columns.shape
    share = COPIED_SHARES[0] * (COPIED_SHARES[1] / COPIED_SHARES[0]) ** strength
    number = max(1, round(share * rows))
    order = rng.permutation(rows)
    copies = order[:number]
    originals = rng.choice(order[number:], number)
    raw.columns[copies], raw.target[copies] = raw.columns[originals], raw.target[originals]
    changed = copies[rng.random(number) < rng.random()]
    columns = rng.integers(features, size=len(changed))
    raw.columns[changed, columns] = raw.columns[rng.integers(rows, size=len(changed)), columns]
    return f"{number} rows are copies, {len(changed)} of them with one value changed"


def shift(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Reorder the rows so that the last ones, the query rows, tend to lie high in one column, as those of a later time,
    or along a direction in several columns.

    Raises Rejected("split") if labeled and query rows hold different classes in each of 11 draws.
    """
    slope = SLOPES[0] * (SLOPES[1] / SLOPES[0]) ** strength
    varying = np.flatnonzero((raw.columns != raw.columns[0]).any(0))
    if len(varying) == 0:
        raise Rejected("constant")
    for _ in range(1 + SPLIT_ATTEMPTS):
        number = 1 if rng.random() < 0.5 else DIRECTION_COLUMNS
        picked = rng.permutation(varying)[:number]
        z = clamp_and_standardize(torch.from_numpy(raw.columns[:, picked])).numpy()
        score = z @ rng.standard_normal(len(picked))
        keys = slope * ranks(score[None], rng)[0] + rng.gumbel(size=len(score))
        order = np.argpartition(keys, raw.train_size)
        order = np.concatenate([np.sort(order[: raw.train_size]), np.sort(order[raw.train_size :])])
        if raw.num_classes == 0 or is_valid_split(raw.target[order], raw.num_classes, raw.train_size):
            raw.take(order)
            return f"query rows lie toward one end of columns {', '.join(map(str, picked))}, with slope {slope:.1f}"
    raise Rejected("split")
