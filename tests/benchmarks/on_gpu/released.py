"""The released network, as its trainer runs it, beside ours: the same tables, in turns."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from on_gpu.agreement import LIMITS, build, judged
from on_gpu.measure import Row, Setting, alternate, random_pack, shapes_of_stage1
from on_gpu.parts import Steps
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tabicl_train.model.public_config import to_public
from tabicl_train.module import query_losses

GROUP = 4  # tables of a micro-batch; narrower ones are padded with zeros, which its trainer counts as features
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Batch = tuple[Tensor, Tensor, Tensor]  # X (B, N, M), labels of the first rows (B, n), labels of the others


def released(setting: Setting, deadline: float) -> list[Row]:
    """Raises ImportError where tabicl is not installed."""
    from tabicl._model.tabicl import TabICL as Released

    steps = Steps(setting)
    ours = build(setting).to(setting.device).train()
    theirs = Released(**to_public(ours.config))
    theirs.load_state_dict(ours.state_dict())
    theirs.to(setting.device).train()
    rows = [agreement(ours, theirs, setting)]
    packs = steps.item.packs
    batches = micro_batches(packs)

    def our_pass() -> None:
        parameters = [p for p in ours.parameters() if p.requires_grad]
        with torch.autocast(setting.device.type, setting.dtype, enabled=setting.dtype != torch.float32):
            for pack in packs:
                torch.autograd.grad(query_losses(ours, pack).sum(), parameters, materialize_grads=True)

    def their_pass() -> None:
        theirs.zero_grad(set_to_none=True)
        for X, y_train, y in batches:
            with (
                torch.autocast(setting.device.type, setting.dtype, enabled=setting.dtype != torch.float32),
                sdpa_kernel(KERNELS),
            ):
                loss = F.cross_entropy(theirs(X, y_train).float().flatten(0, 1), y.flatten())
            loss.backward()

    times = alternate(setting, {"ours": our_pass, "released": their_pass}, deadline)
    for name, value in times.items():
        note = f"{len(packs)} passes" if name == "ours" else f"{len(batches)} micro-batches of up to {GROUP} tables"
        rows.append(Row("released", f"forward and backward of a stage-1 step, {name}", value, "s", None, note))
    rows.append(Row("released", "ours is so many times as fast", times["released"] / times["ours"], "times"))
    return rows


def micro_batches(packs: list) -> list[Batch]:
    """All tables, padded to the widest of their micro-batch."""
    tables = sorted((table for pack in packs for table in pack.tables()), key=lambda t: (*t[0].shape[:1], t[2]))
    batches = []
    for (_, n), same in groupby(tables, lambda t: (len(t[1]), t[2])):
        members = list(same)
        for some in (members[i : i + GROUP] for i in range(0, len(members), GROUP)):
            widest = max(X.shape[1] for X, _, _ in some)
            X = torch.stack([F.pad(X, (0, widest - X.shape[1])) for X, _, _ in some])
            y = torch.stack([y for _, y, _ in some])
            batches.append((X, y[:, :n].contiguous(), y[:, n:]))
    return batches


def agreement(ours: torch.nn.Module, theirs: torch.nn.Module, setting: Setting) -> Row:
    """Relative difference of the losses of a few tables in fp32."""
    pack = random_pack(shapes_of_stage1(True), setting.device)
    with torch.no_grad(), sdpa_kernel(KERNELS):
        expected = query_losses(ours, pack)
        found = []
        for X, y, n in pack.tables():
            logits = theirs(X[None], y[None, :n])
            found.append(F.cross_entropy(logits[0].float(), y[n:]))
    return judged("losses of the released network in fp32", torch.stack(found), expected, LIMITS["fp32"])
