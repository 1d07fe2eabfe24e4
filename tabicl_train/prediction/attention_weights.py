"""The attention weights of a network on a table, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import INDUCING, LABELED, Sequence, attention_layers, logits, recorded

__all__ = ["attention_weights"]


@torch.no_grad()
def attention_weights(network: Network, X: Any, y: Any) -> dict[str, np.ndarray]:
    """Return the weights of the labeled rows in each attention layer in which rows are keys.

    N rows, the first n of them labeled, M features, G feature groups (in most networks as many as features),
    I inducing points, H heads.

    Parameters
    ----------
    network : Network
        For example from `load_network`, or `network_` of an estimator.
    X : array or Tensor of shape (N, M)
        The table as networks take it: standardized by its labeled rows, as by
        `priors.real.preprocessing.Normalizer("none")`.
    y : array or Tensor of shape (n,)
        The labels of the first n rows: classes from 0, or standardized numbers.

    Returns
    -------
    dict of str to array
        By layer, in the order of a forward pass, float64, with sums of 1 over the last axis:

        - `icl.0`, ...: (H, N - n, n), the weights that each query row gives to the labeled rows in in-context learning;
        - `column.0`, ...: (G, H, I, n), the weights that the inducing points of each column give to its labeled cells.

        All arrays are in memory at once.

    Raises
    ------
    ConfigError
        If the network names no such layers.

    References
    ----------
    Column stage and in-context learning: Qu et al., TabICL, arXiv 2502.05564, section 3.
    """
    # The table as a pack of one.
    layers = attention_layers(network)
    device = next(network.parameters()).device
    labels = torch.as_tensor(y, device=device)
    labels = labels.float() if network.config.is_regression else labels.long()
    pack = Pack.stack(torch.as_tensor(X, dtype=torch.float32, device=device)[None], labels[None])

    # What each layer does with the query rows and the inducing points; labeled rows look at each other, too.
    weights: dict[str, np.ndarray] = {}

    def watch(layer: str, sequences: list[Sequence]) -> None:
        columns: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        for sequence in sequences:
            if sequence.kind == LABELED:
                continue
            z = logits(layers[layer], sequence.q, sequence.k)  # (H, queries, n)
            w = torch.softmax(z, dim=-1).cpu().numpy()
            if sequence.kind == INDUCING:
                columns.append(w)
            else:
                rows.append(w)
        # All query rows of a table are one sequence, and each column has one of its own.
        weights[layer] = np.stack(columns) if columns else rows[0]

    was_training = network.training
    network.eval()
    with recorded(layers, watch):
        network(pack)
    network.train(was_training)
    return weights
