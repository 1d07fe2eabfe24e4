import torch
import torch.nn.functional as F


def turn(x, cos, sin, interleaved):
    half = x.shape[-1] // 2
    partner = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else x.roll(half, -1)
    shape = (x.shape[1],) + (1,) * (x.dim() - 3) + (x.shape[-1],)
    cos, sin = (table[: x.shape[1]].view(shape).to(x.dtype) for table in (cos, sin))
    return torch.addcmul(x * cos, partner, sin)


def attend_rows(q, kv, runs, starts, cos, sin, interleaved):
    runs = runs.tolist()
    rows = sum(r for r, _ in runs)
    if kv is None:
        q, kv = q.split([1, 2], 1)
    C = None if q.shape[0] == kv.shape[0] else q.shape[0] // rows
    outs, a, b = [], 0, 0
    for r, T in runs:
        Q = C or T
        one = turn(q[a : a + r * Q].unflatten(0, (r, Q)), cos, sin, interleaved)[:, :, 0].transpose(1, 2)
        k, v = kv[b : b + r * T].unflatten(0, (r, T)).unbind(2)
        k = turn(k, cos, sin, interleaved).transpose(1, 2)
        outs.append(F.scaled_dot_product_attention(one, k, v.transpose(1, 2)).transpose(1, 2).flatten(0, 1))
        a, b = a + r * Q, b + r * T
    return torch.cat(outs)
