"""Scores of predicted numbers and quantiles."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.metrics import r2_score, root_mean_squared_error

from priors.real.target_scale import TargetScale
from tabicl_train.config.monitoring import INTERVAL
from tabicl_train.errors import ConfigError
from tabicl_train.model.quantiles import pinball

NUMBER_METRICS = ("r2", "rmse", "pinball", "coverage", "width")
LEVELS = np.linspace(*INTERVAL, 9)  # 0.1, 0.2, ..., 0.9, of the pinball loss
COVERAGE = INTERVAL[1] - INTERVAL[0]  # if the quantiles are right
MARGINAL = "marginal quantiles"  # the method that predicts those of the labeled rows


def standardize(y: np.ndarray, labeled: np.ndarray) -> np.ndarray:
    """y (rows,) with mean 0 and standard deviation 1 over the rows at the indices `labeled`; raises ConfigError if all
    these are equal."""
    scale = TargetScale(y[labeled])
    if scale.std == 0:
        raise ConfigError([f"the target of all {len(labeled)} labeled rows of a split is {y[labeled][0]:g}"])
    return scale.standardize(y)


def score_numbers(y: np.ndarray, mean: np.ndarray, quantiles: np.ndarray | None) -> dict[str, float]:
    """The NUMBER_METRICS of predictions for targets y (rows,), which `standardize` returned.

    mean: (rows,); r2 and rmse judge it
    quantiles: (rows, levels) at LEVELS; pinball is the mean over them, coverage the share of targets from the first to
        the last one, width the mean distance between these two. The three are nan without quantiles.
    """
    scores = dict.fromkeys(NUMBER_METRICS, float("nan"))
    scores |= {"r2": float(r2_score(y, mean)), "rmse": float(root_mean_squared_error(y, mean))}
    if quantiles is not None:
        low, high = quantiles[:, 0], quantiles[:, -1]
        scores["pinball"] = pinball(torch.from_numpy(quantiles), torch.from_numpy(y)).mean().item()
        scores["coverage"] = float(np.mean((low <= y) & (y <= high)))
        scores["width"] = float(np.mean(high - low))
    return scores
