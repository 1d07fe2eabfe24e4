"""How fast a device could compute at best."""

from __future__ import annotations

import torch

# 10^12 FLOPs per second of dense matrix products, by the makers' data sheets: 16-bit formats, fp32 without TF32
PEAK_TFLOPS = {"H200": (989, 67), "H100": (989, 67), "A100": (312, 19.5), "L40S": (362, 91.6), "4090": (165, 82.6)}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOPs per second that a device can reach at most; None if that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for part, peaks in PEAK_TFLOPS.items() if part in name), None)
    return None if peaks is None else peaks[precision == "fp32"] * 1e12
