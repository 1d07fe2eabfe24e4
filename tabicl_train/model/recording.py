"""Records what the attention layers of a network get while it predicts, so that their weights can be computed.

The layers in which rows are keys are those of `Network.named_attentions`. Hooks see every call of them, so that the
queries, keys and logits are those of the network. Logits are computed in float64.

Q queries, K keys, H heads, d elements of a head, E embedding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tabicl_train.errors import ConfigError
from tabicl_train.model.attention import Attention
from tabicl_train.model.averaging import signed_log
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Spans
from tabicl_train.model.scaling import SSA

__all__ = ["INDUCING", "LABELED", "QUERY", "Sequence", "attention_layers", "exponents", "logits", "recorded"]

# kinds of queries
INDUCING = "inducing points"
LABELED = "labeled rows"
QUERY = "query rows"


class Sequence(NamedTuple):
    """Queries of one kind that attend to the same keys.

    x, context: the tokens of queries and keys, (Q, E) and (K, E), from which the layer projects them
    projected: (Q, H, d) queries before the length scaling; q: after it, as the layer's logits take them
    k, v: (K, H, d)
    """

    kind: str
    x: Tensor
    context: Tensor
    projected: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def sequences(spans: Spans, x: Tensor, context: Tensor, projected: Tensor, q: Tensor, kv: Tensor) -> Iterator[Sequence]:
    """Yield the sequences of a call of a layer: fields as there, but of all queries and keys; kv (K, 2, H, d)."""
    assert isinstance(spans.runs, Tensor)  # not exported
    # With both kinds of rows, the runs of labeled rows come first, and as many of query rows follow.
    runs = spans.runs.tolist()
    has_both_kinds = spans.uses == 2
    start = 0
    for number, (count, length, keys, first_key, _) in enumerate(runs):
        if spans.shares_queries:
            kind = INDUCING
        elif has_both_kinds and number < len(runs) // 2:
            kind = LABELED
        else:
            kind = QUERY
        for i in range(count):
            # Keys follow from the first one of the run; queries follow one another, unless all sequences share them.
            queries = slice(0, length) if spans.shares_queries else slice(start, start + length)
            seen = slice(first_key + i * keys, first_key + (i + 1) * keys)
            yield Sequence(kind, x[queries], context[seen], projected[queries], q[queries], *kv[seen].unbind(1))
            start += length


def attention_layers(network: Network) -> dict[str, Attention]:
    """Return the layers of a network in which rows are keys, by name, such as icl.0, in the order of a forward pass.

    Raises
    ------
    ConfigError
        If the network names no such layers.
    """
    layers = dict(network.named_attentions())
    if not layers:
        name = type(network).__name__
        raise ConfigError([f"{name} names no attention layers; its method named_attentions must yield them"])
    return layers


@contextlib.contextmanager
def recorded(attentions: dict[Any, Attention], watch: Callable[[Any, list[Sequence]], None]) -> Iterator[None]:
    """Call `watch` with the key of a layer and its sequences, before the layer computes its output.

    The tables of a call need the same number of labeled rows, since shared queries are recorded with one factor.
    """

    def hook_of(key: Any) -> Callable:
        def hook(attention: Attention, arguments: tuple) -> None:
            x, context, spans, log_n, table = arguments
            # The layer computes the same again after this. Rows are keys, so there is a context.
            projected, kv = attention.project(x, context)
            assert kv is not None
            q = attention.scale(projected, log_n, table, spans)
            if spans.shares_queries:
                q = q[0]
            watch(key, list(sequences(spans, x, context, projected, q, kv)))

        return hook

    handles = [attention.register_forward_pre_hook(hook_of(key)) for key, attention in attentions.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Compute what the softmax of a layer is taken of, float64 (H, Q, K).

    Parameters
    ----------
    attention : Attention
        The layer.
    q : Tensor
        (Q, H, d), queries after the length scaling.
    k : Tensor
        (K, H, d).
    """
    z = q.double().transpose(0, 1) @ k.double().permute(1, 2, 0) / math.sqrt(q.shape[-1])  # (H, Q, K)
    p = exponents(attention)
    if p is None:
        return z
    return p.double()[:, None, None] * signed_log(z)


def exponents(attention: Attention) -> Tensor | None:
    """Return p of each head (H,) in a layer with signed averaging, see model/scaling.py; None in others."""
    return attention.ssmax_layer.exponents() if isinstance(attention.ssmax_layer, SSA) else None
