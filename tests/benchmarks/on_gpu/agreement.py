"""Whether fast paths compute what plain ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from on_gpu.measure import Row, Setting, random_pack, shapes_of_stage1
from torch import Tensor

from tabicl_train.config.compose import compose
from tabicl_train.model import TabICL
from tabicl_train.model.attention import Rotary, attend
from tabicl_train.model.kernels.row_attention import attend_rows
from tabicl_train.model.layout import Rows, Spans, column_layout, context_layout, row_layout
from tabicl_train.module import query_losses

MIXED = [(64, 40, 3), (64, 40, 3), (64, 40, 7), (96, 31, 1), (96, 60, 12), (130, 128, 5), (200, 100, 20)]
# Relative differences, as norms: bf16 keeps 8 bits, and a dozen blocks add up.
LIMITS = {"fp32": 1e-3, "bf16": 3e-2}


class Wrong(Exception):
    """A fast path differs from the plain one; the message says by how much."""


def difference(values: Tensor, exact: Tensor) -> float:
    values, exact = values.double().cpu(), exact.double().cpu()
    return float((values - exact).norm() / exact.norm())


def agreement(setting: Setting, deadline: float) -> list[Row]:
    return [*network(setting), *attention_paths(setting)]


def judged(name: str, values: Tensor, exact: Tensor, limit: float) -> Row:
    """The relative difference; raises Wrong above the limit, also for NaN."""
    found = difference(values, exact)
    if not found <= limit:
        raise Wrong(f"{name}: {found:.1e} of the norm, at most {limit:.0e} are allowed")
    return Row("agreement", name, found, "of the norm", note=f"at most {limit:.0e}")


def network(setting: Setting) -> list[Row]:
    """The whole network on the device, beside fp32 on the CPU."""
    torch.manual_seed(0)
    exact = build(setting).train()
    shapes = MIXED[:4] if setting.tiny else MIXED
    expected = losses_and_gradient(exact, random_pack(shapes, torch.device("cpu")), torch.float32)
    pack = random_pack(shapes, setting.device)
    net = copy.deepcopy(exact).to(setting.device)
    rows = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found = losses_and_gradient(net, pack, dtype)
        for what, values, reference in zip(("losses", "gradient"), found, expected, strict=True):
            limit = LIMITS[name] * (1 if what == "losses" else 3)
            rows.append(judged(f"{what} in {name}", values, reference, limit))
    return rows


def build(setting: Setting) -> TabICL:
    """The network with random weights; what starts at zero would hide errors."""
    model = TabICL(compose(setting.overrides).model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.02)
    return model


def losses_and_gradient(model: TabICL, pack, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.autocast(pack.X.device.type, dtype, enabled=dtype != torch.float32):
        losses = query_losses(model, pack)
    gradients = torch.autograd.grad(losses.sum(), parameters, materialize_grads=True)
    return losses.detach(), torch.cat([g.flatten() for g in gradients])


def attention_paths(setting: Setting) -> list[Row]:
    """Attention of every stage at the sizes of a step, forward and backward, beside plain attention in fp32."""
    c, shapes = compose(setting.overrides).model, sorted(shapes_of_stage1(setting.tiny))
    sizes = torch.tensor(shapes, device=setting.device)
    columns = column_layout(sizes, shapes, c.col_num_inducing)
    column, icl = (c.col_num_heads, c.embed_dim // c.col_num_heads), (c.icl_num_heads, c.row_dim // c.icl_num_heads)
    shared = (len(shapes), c.col_num_inducing)
    to, back = columns.to_inducing, columns.from_inducing
    return [
        spans_path("to inducing points", to, column, shared, setting),
        spans_path("from inducing points", back, column, (back.queries,), setting),
        spans_path("in-context learning", (spans := context_layout(sizes, shapes).all), icl, (spans.queries,), setting),
        row_path(row_layout(sizes, shapes, c.row_num_cls, columns), c.row_num_heads, setting),
    ]


def spans_path(name: str, spans: Spans, heads: tuple[int, int], queries: tuple[int, ...], setting: Setting) -> Row:
    """heads: their number and width; queries: the leading sizes of q, see attend"""
    keys = max(first + count * length for count, _, length, first, _ in spans.runs.tolist())
    q = torch.randn(*queries, *heads, device=setting.device)
    kv = torch.randn(keys, 2, *heads, device=setting.device)
    return compare(name, [q, kv], lambda q, kv: attend(q, kv, spans), lambda q, kv: plain(q, kv, spans), setting)


def row_path(rows: Rows, heads: int, setting: Setting) -> Row:
    runs, width = rows.runs.tolist(), 16
    tokens, longest = sum(count * length for count, length in runs), max(length for _, length in runs)
    qkv = torch.randn(tokens, 3, heads, width, device=setting.device)
    rotary = Rotary(width, 100_000, interleaved=True).to(setting.device)
    cos, sin = rotary(longest)
    angles = torch.arange(longest, device=setting.device)[:, None] * rotary.freqs  # (T, width / 2)

    def fast(qkv: Tensor) -> Tensor:
        return attend_rows(qkv, None, rows.runs, rows.starts, cos, sin, True)

    return compare("rows", [qkv], fast, lambda qkv: plain_rows(qkv, runs, angles), setting)


def compare(
    name: str, inputs: list[Tensor], fast: Callable[..., Tensor], slow: Callable[..., Tensor], setting: Setting
) -> Row:
    """A path in the dtype of the run beside one in fp32, from the same rounded inputs; results and gradients."""
    dtype, slopes = setting.dtype, None
    results = []
    for function, chosen in ((fast, dtype), (slow, torch.float32)):
        given = [x.to(dtype).to(chosen).requires_grad_() for x in inputs]
        out = function(*given)
        slopes = torch.randn(out.shape, device=out.device) if slopes is None else slopes
        gradients = torch.autograd.grad((out.float() * slopes).sum(), given)
        results.append(torch.cat([x.detach().float().flatten() for x in (out, *gradients)]))
        del out, gradients  # some gigabytes
    return judged(f"attention, {name}, {dtype}", *results, LIMITS["bf16" if dtype == torch.bfloat16 else "fp32"])


def plain(q: Tensor, kv: Tensor, spans: Spans) -> Tensor:
    """Softmax attention of one run of equal sequences after the other."""
    outs, start = [], 0
    for count, length, keys, first, table in spans.runs.tolist():
        if q.dim() == 4:
            some = q[table if len(q) > 1 else 0].expand(count, -1, -1, -1)
        else:
            some = q[start : start + count * length].unflatten(0, (count, length))
        k, v = kv[first : first + count * keys].unflatten(0, (count, keys)).unbind(2)  # (count, keys, H, d)
        outs.append(softmax_attention(some, k, v).flatten(0, 1))
        start += count * length
    return torch.cat(outs)


def plain_rows(qkv: Tensor, runs: list[list[int]], angles: Tensor) -> Tensor:
    """Row attention; neighboring elements of queries and keys are turned as complex numbers. angles: (T, d / 2)"""
    outs, start = [], 0
    for count, length in runs:
        q, k, v = qkv[start : start + count * length].unflatten(0, (count, length)).unbind(2)  # (count, T, H, d)
        turn = torch.polar(torch.ones_like(angles[:length]), angles[:length])[:, None]  # (T, 1, d / 2)
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            for x in (q, k)
        )
        outs.append(softmax_attention(q, k, v).flatten(0, 1))
        start += count * length
    return torch.cat(outs)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, L, H, d), k and v (B, K, H, d) -> (B, L, H, d), a few sequences at a time: the weights are large."""
    outs = []
    step = max(1, 2**28 // (q.shape[1] * q.shape[2] * k.shape[1]))
    for a, b, c in zip(q.split(step), k.split(step), v.split(step), strict=True):
        weights = torch.einsum("blhd,bkhd->bhlk", a, b).div(q.shape[-1] ** 0.5).softmax(-1)
        outs.append(torch.einsum("bhlk,bkhd->blhd", weights, c))
    return torch.cat(outs)
