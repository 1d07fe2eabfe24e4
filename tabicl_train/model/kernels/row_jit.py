"""The Triton kernels of row_triton.py: attention of the tokens of one row, forward and backward.

A program takes one row and G of its heads. A batched product gives each head to one warp, so that softmax needs no
exchange between warps and tokens are read in whole cache lines. Keys (forward) or queries (backward) are padded to a
block size and held in one to four parts, since larger tiles spill; the loop over the others ends at T rounded up to 16,
the rows of a tensor-core tile. Rotated pairs lie beside each other in registers, whatever their layout in memory: the
score does not depend on the order of the elements.

R rows, T tokens of a row, C queries of a row in cross-attention (0: self-attention), H heads, d head dimension,
P: d rounded up to a power of two, at least 16, the least that tensor cores multiply.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(base, t, stride, inside, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Tokens t of G heads -> (tokens, G, P), zero where `inside` is false and from element D on."""
    i = tl.arange(0, P)[None, None, :]
    mask = inside[:, None, None]
    if D < P:
        mask = mask & (i < D)
    return tl.load(base + t[:, None, None] * stride + tl.arange(0, G)[None, :, None] * D + i, mask=mask, other=0.0)


@triton.jit
def _store(base, x, t, stride, inside, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """x (tokens, G, P) into tokens t of G heads, the first D elements of each."""
    i = tl.arange(0, P)[None, None, :]
    mask = inside[:, None, None]
    if D < P:
        mask = mask & (i < D)
    to = base + t[:, None, None] * stride + tl.arange(0, G)[None, :, None] * D + i
    tl.store(to, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_pairs(base, t, stride, inside, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second elements of the rotated pairs, (tokens, G, P/2) each."""
    if INTERLEAVED:
        x = _load(base, t, stride, inside, G, D, P)
        first, second = tl.split(tl.reshape(x, (t.shape[0], G, P // 2, 2)))
    else:
        i = tl.arange(0, P // 2)[None, None, :]
        mask = inside[:, None, None]
        if D < P:
            mask = mask & (i < D // 2)
        at = base + t[:, None, None] * stride + tl.arange(0, G)[None, :, None] * D + i
        first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + D // 2, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _load_turned(
    base, cos, sin, t, stride, inside, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Tokens at positions t, rotated, in the dtype of `base`: first and second elements, (G, tokens, P/2) each."""
    first, second = _load_pairs(base, t, stride, inside, G, D, P, INTERLEAVED)
    c, _ = _load_pairs(cos, t, D, inside, 1, D, P, INTERLEAVED)
    s, _ = _load_pairs(sin, t, D, inside, 1, D, P, INTERLEAVED)
    dtype = base.dtype.element_ty
    first, second = (first * c + second * s).to(dtype), (second * c - first * s).to(dtype)
    return tl.permute(first, (1, 0, 2)), tl.permute(second, (1, 0, 2))


@triton.jit
def _joined(first, second):
    """Two halves (G, tokens, P/2) -> (G, tokens, P), pairs beside each other."""
    return tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * first.shape[2]))


@triton.jit
def _store_turned_back(
    base, first, second, cos, sin, t, stride, inside,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The gradient of what `_load_turned` returned, into the gradient of what it read."""
    first, second = tl.permute(first, (1, 0, 2)), tl.permute(second, (1, 0, 2))
    c, _ = _load_pairs(cos, t, D, inside, 1, D, P, INTERLEAVED)
    s, _ = _load_pairs(sin, t, D, inside, 1, D, P, INTERLEAVED)
    first, second = first * c - second * s, second * c + first * s
    if INTERLEAVED:
        _store(base, _joined(first, second), t, stride, inside, G, D, P)
    else:
        i = tl.arange(0, P // 2)[None, None, :]
        mask = inside[:, None, None]
        if D < P:
            mask = mask & (i < D // 2)
        at = base + t[:, None, None] * stride + tl.arange(0, G)[None, :, None] * D + i
        tl.store(at, first.to(base.dtype.element_ty), mask=mask)
        tl.store(at + D // 2, second.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _place(starts, row0, H: tl.constexpr, G: tl.constexpr):
    """This program's row, its first token (both int64, since offsets pass 2^31), its length and its first head."""
    row = row0 + tl.program_id(0) // (H // G)
    begin = tl.load(starts + row)
    length = (tl.load(starts + row + 1) - begin).to(tl.int32)
    return row.to(tl.int64), begin.to(tl.int64), length, tl.program_id(0) % (H // G) * G


@triton.jit
def _load_keys(
    kv, cos, sin, key, T, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    STRIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Keys (G, P, keys), rotated, and values (G, keys, P). HEADS: elements of all heads, from a key to its value."""
    first, second = _load_turned(kv, cos, sin, key, STRIDE, key < T, G, D, P, INTERLEAVED)
    v = _load(kv + HEADS, key, STRIDE, key < T, G, D, P)
    return tl.permute(_joined(first, second), (0, 2, 1)), tl.permute(v, (1, 0, 2))


@triton.jit(do_not_specialize=["row0"])
def forward_kernel(
    q, kv, starts, cos, sin, out, lse, row0, scale,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """C: queries per row, or 0 for all tokens of the row, whose projections then lie beside keys and values."""
    row, begin, T, head = _place(starts, row0, H, G)
    if C == 0:
        q_token, count = begin, T
    else:
        q_token, count = row * C, C
    Q_STRIDE: tl.constexpr = (3 if C == 0 else 1) * H * D
    KV_STRIDE: tl.constexpr = (3 if C == 0 else 2) * H * D
    q += q_token * Q_STRIDE + head * D
    kv += begin * KV_STRIDE + head * D
    out += q_token * (H * D) + head * D
    lse += q_token * H + head

    key_a = tl.arange(0, A)
    k_a, v_a = _load_keys(kv, cos, sin, key_a, T, G, D, P, INTERLEAVED, KV_STRIDE, H * D)
    if B > 0:
        key_b = A + tl.arange(0, B)
        k_b, v_b = _load_keys(kv, cos, sin, key_b, T, G, D, P, INTERLEAVED, KV_STRIDE, H * D)
    for start in range(0, count, 16):
        t = start + tl.arange(0, 16)
        inside = t < count
        first, second = _load_turned(q, cos, sin, t, Q_STRIDE, inside, G, D, P, INTERLEAVED)
        turned = _joined(first, second)
        score_a = tl.dot(turned, k_a, input_precision="ieee")  # (G, 16, A)
        if B > 0:
            score_b = tl.dot(turned, k_b, input_precision="ieee")  # (G, 16, B)
            score_b = tl.where((key_b < T)[None, None, :], score_b, float("-inf"))
            top = tl.maximum(tl.max(score_a, 2), tl.max(score_b, 2))
        else:
            score_a = tl.where((key_a < T)[None, None, :], score_a, float("-inf"))
            top = tl.max(score_a, 2)
        shift = top * (scale * LOG2E)
        p = tl.exp2(score_a * (scale * LOG2E) - shift[:, :, None])
        total = tl.sum(p, 2)
        mixed = tl.dot(p.to(v_a.dtype), v_a, input_precision="ieee")  # (G, 16, P)
        if B > 0:
            p = tl.exp2(score_b * (scale * LOG2E) - shift[:, :, None])
            total += tl.sum(p, 2)
            mixed = tl.dot(p.to(v_b.dtype), v_b, mixed, input_precision="ieee")
        mixed *= (1 / total)[:, :, None]
        _store(out, tl.permute(mixed, (1, 0, 2)), t, H * D, inside, G, D, P)
        at = lse + t[:, None] * H + tl.arange(0, G)[None, :]
        tl.store(at, tl.trans(top * scale + tl.log(total)), mask=inside[:, None])


@triton.jit
def _load_queries(
    q, out, lse, grad, cos, sin, t, count,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """What the backward pass needs of queries t: q (two halves), q^T, gradient, its transpose, lse, grad . out."""
    inside = t < count
    first, second = _load_turned(q, cos, sin, t, STRIDE, inside, G, D, P, INTERLEAVED)
    g = _load(grad, t, H * D, inside, G, D, P)
    delta = tl.sum(g.to(tl.float32) * _load(out, t, H * D, inside, G, D, P).to(tl.float32), 2)
    g = tl.permute(g, (1, 0, 2))
    at = lse + t[:, None] * H + tl.arange(0, G)[None, :]
    norm = tl.trans(tl.load(at, mask=inside[:, None], other=float("inf"))) * LOG2E  # infinite: no weight beyond
    turned = tl.permute(_joined(first, second), (0, 2, 1))
    return first, second, turned, g, tl.permute(g, (0, 2, 1)), norm, tl.trans(delta)


@triton.jit
def _gradients(keys, queries, dkeys, dqueries, present, scale):
    """Adds what 16 keys and some queries give to each other's gradients (those of k and q still without `scale`)."""
    k1, k2, k, v = keys
    q1, q2, q_t, g, g_t, norm, delta = queries
    dk1, dk2, dv = dkeys
    dq1, dq2 = dqueries
    p = tl.exp2(tl.dot(k, q_t, input_precision="ieee") * (scale * LOG2E) - norm[:, None, :])  # (G, 16, queries)
    p = tl.where(present[None, :, None], p, 0.0)
    dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
    ds = (p * (tl.dot(v, g_t, input_precision="ieee") - delta[:, None, :])).to(g.dtype)
    dk1 = tl.dot(ds, q1, dk1, input_precision="ieee")
    dk2 = tl.dot(ds, q2, dk2, input_precision="ieee")
    ds = tl.permute(ds, (0, 2, 1))
    dq1 = tl.dot(ds, k1, dq1, input_precision="ieee")
    dq2 = tl.dot(ds, k2, dq2, input_precision="ieee")
    return (dk1, dk2, dv), (dq1, dq2)


@triton.jit
def _store_queries(
    dq, d, cos, sin, t, count, scale,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    first, second = d
    _store_turned_back(dq, first * scale, second * scale, cos, sin, t, STRIDE, t < count, G, D, P, INTERLEAVED)


@triton.jit(do_not_specialize=["row0"])
def backward_kernel(
    q, kv, starts, cos, sin, out, lse, grad, dq, dkv, row0, scale,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    W: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scores are computed again, keys before queries, so that only their gradient has to be transposed."""
    row, begin, T, head = _place(starts, row0, H, G)
    if C == 0:
        q_token, count = begin, T
    else:
        q_token, count = row * C, C
    Q_STRIDE: tl.constexpr = (3 if C == 0 else 1) * H * D
    KV_STRIDE: tl.constexpr = (3 if C == 0 else 2) * H * D
    q += q_token * Q_STRIDE + head * D
    dq += q_token * Q_STRIDE + head * D
    kv += begin * KV_STRIDE + head * D
    dkv += begin * KV_STRIDE + head * D
    out += q_token * (H * D) + head * D
    grad += q_token * (H * D) + head * D
    lse += q_token * H + head

    t = tl.arange(0, W)
    zero = tl.zeros((G, W, P // 2), tl.float32)
    q0 = _load_queries(q, out, lse, grad, cos, sin, t, count, H, G, D, P, INTERLEAVED, Q_STRIDE)
    d0 = (zero, zero)
    if PARTS > 1:
        q1 = _load_queries(q, out, lse, grad, cos, sin, W + t, count, H, G, D, P, INTERLEAVED, Q_STRIDE)
        d1 = (zero, zero)
    if PARTS > 2:
        q2 = _load_queries(q, out, lse, grad, cos, sin, 2 * W + t, count, H, G, D, P, INTERLEAVED, Q_STRIDE)
        d2 = (zero, zero)
    if PARTS > 3:
        q3 = _load_queries(q, out, lse, grad, cos, sin, 3 * W + t, count, H, G, D, P, INTERLEAVED, Q_STRIDE)
        d3 = (zero, zero)
    for start in range(0, T, 16):
        key = start + tl.arange(0, 16)
        present = key < T
        k1, k2 = _load_turned(kv, cos, sin, key, KV_STRIDE, present, G, D, P, INTERLEAVED)
        v = tl.permute(_load(kv + H * D, key, KV_STRIDE, present, G, D, P), (1, 0, 2))
        keys = (k1, k2, _joined(k1, k2), v)
        half = tl.zeros((G, 16, P // 2), tl.float32)
        dkeys = (half, half, tl.zeros((G, 16, P), tl.float32))
        dkeys, d0 = _gradients(keys, q0, dkeys, d0, present, scale)
        if PARTS > 1:
            dkeys, d1 = _gradients(keys, q1, dkeys, d1, present, scale)
        if PARTS > 2:
            dkeys, d2 = _gradients(keys, q2, dkeys, d2, present, scale)
        if PARTS > 3:
            dkeys, d3 = _gradients(keys, q3, dkeys, d3, present, scale)
        dk1, dk2, dv = dkeys
        _store_turned_back(dkv, dk1 * scale, dk2 * scale, cos, sin, key, KV_STRIDE, present, G, D, P, INTERLEAVED)
        _store(dkv + H * D, tl.permute(dv, (1, 0, 2)), key, KV_STRIDE, present, G, D, P)
    _store_queries(dq, d0, cos, sin, t, count, scale, G, D, P, INTERLEAVED, Q_STRIDE)
    if PARTS > 1:
        _store_queries(dq, d1, cos, sin, W + t, count, scale, G, D, P, INTERLEAVED, Q_STRIDE)
    if PARTS > 2:
        _store_queries(dq, d2, cos, sin, 2 * W + t, count, scale, G, D, P, INTERLEAVED, Q_STRIDE)
    if PARTS > 3:
        _store_queries(dq, d3, cos, sin, 3 * W + t, count, scale, G, D, P, INTERLEAVED, Q_STRIDE)
