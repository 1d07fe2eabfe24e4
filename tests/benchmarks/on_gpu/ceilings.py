"""What the device does at best: copies, matrix products, launches."""

from __future__ import annotations

import torch
from on_gpu.measure import Row, Setting, seconds
from on_gpu.roofline import RATES


def ceilings(setting: Setting, deadline: float) -> list[Row]:
    return [copies(setting), *products(setting), launches(setting)]


def copies(setting: Setting) -> Row:
    source = torch.randn(2**14 if setting.tiny else 2**28, device=setting.device)
    target = source.clone()
    time = seconds(setting.device, lambda: target.copy_(source), 10)
    rate = setting.rates["bytes"] = 2 * source.nbytes / time
    return Row("ceilings", "copy, read and written", rate / 1e12, "TB/s", RATES["bytes"] / 1e12)


def products(setting: Setting) -> list[Row]:
    """Large square products, and two of the network: of the column and row stages, and of in-context learning."""
    wide, cells, rows = (64, 512, 256) if setting.tiny else (8192, 2**20, 2**16)
    half, full = torch.bfloat16, torch.float32
    found = [
        product(setting, "bf16", half, (wide, wide, wide)),
        product(setting, "fp32", full, (wide, wide, wide), "fp32"),
        product(setting, "tf32", full, (wide, wide, wide), tf32=True),
        product(setting, "bf16", half, (cells, 128, 256)),
        product(setting, "bf16", half, (rows, 512, 1024), "half"),
    ]
    return found


def product(
    setting: Setting, name: str, dtype: torch.dtype, sizes: tuple[int, int, int], rate: str | None = None, tf32=False
) -> Row:
    """rate: the name under which later predictions find the result"""
    rows, inner, columns = sizes
    a = torch.randn(rows, inner, device=setting.device, dtype=dtype)
    b = torch.randn(inner, columns, device=setting.device, dtype=dtype)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.mm(a, b)
    flops = 2 * rows * inner * columns / seconds(setting.device, lambda: torch.mm(a, b), 10)
    torch.backends.cuda.matmul.allow_tf32 = False
    if rate is not None:
        setting.rates[rate] = flops
    guess = RATES[rate] / 1e12 if rate is not None else None
    return Row("ceilings", f"{rows:,} x {inner:,} by {inner:,} x {columns:,}, {name}", flops / 1e12, "TFLOP/s", guess)


def launches(setting: Setting) -> Row:
    """The host's share: kernels this small take less."""
    small = torch.zeros(1, device=setting.device)
    small.add_(1)
    time = seconds(setting.device, lambda: small.add_(1), 1000)
    return Row("ceilings", "launch of an addition", time * 1e6, "us")
