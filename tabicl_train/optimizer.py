"""Muon for matrices and AdamW for the rest, as one optimiser with two kinds of parameter groups.

One optimiser, since Lightning counts a step for each. Both kinds take the same learning rate: the orthogonal update
is scaled by 0.2 * sqrt(max(rows, columns)), which gives it the root mean square of an AdamW update (Moonlight,
arXiv 2502.16982, section 2.2; the TabICLv2 recipe uses the same).
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from tabicl_train.config import OptimizerConfig

# Quintic Newton-Schulz coefficients of Muon (Jordan et al. 2024): steepest at zero, singular values end in 0.7..1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: all singular values moved close to 1.

    matrices: (K, rows, columns), any dtype; computed in bf16 on CUDA, in fp32 elsewhere (CPU bf16 is slower).
    """
    a, b, c = NEWTON_SCHULZ
    X = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = X.size(1) > X.size(2)
    X = X.mT if tall else X
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).to(matrices.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """Groups carry `kind` ("muon" or "adamw"), `lr` and `weight_decay` (decoupled, scaled by lr)."""

    def __init__(self, groups: list[dict], config: OptimizerConfig) -> None:
        self.momentum, self.steps = config.momentum, config.newton_schulz_steps
        self.betas, self.eps = tuple(config.betas), config.eps
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            (self.muon if group["kind"] == "muon" else self.adamw)(parameters, group["lr"])
        return loss

    def muon(self, parameters: list[Tensor], lr: float) -> None:
        """Nesterov momentum, orthogonalised; matrices of one shape go through Newton-Schulz together."""
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in parameters]
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        updates = torch._foreach_lerp(gradients, momenta, self.momentum)
        by_shape = defaultdict(list)
        for p, update in zip(parameters, updates, strict=True):
            by_shape[p.shape].append((p, update))
        for shape, same in by_shape.items():
            directions = orthogonalise(torch.stack([update for _, update in same]), self.steps)
            scale = 0.2 * math.sqrt(max(shape))
            torch._foreach_add_([p for p, _ in same], list(directions.unbind()), alpha=-lr * scale)

    def adamw(self, parameters: list[Tensor], lr: float) -> None:
        beta1, beta2 = self.betas
        for p in parameters:
            if "step" not in self.state[p]:
                self.state[p].update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            self.state[p]["step"] += 1
        step = self.state[parameters[0]]["step"]  # all parameters of a group have taken the same steps
        gradients = [p.grad for p in parameters]
        means = [self.state[p]["mean"] for p in parameters]
        squares = [self.state[p]["square"] for p in parameters]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_addcdiv_(parameters, means, denominators, -lr / (1 - beta1**step))


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon takes it: matrices of the blocks, but no embedding, head, inducing vector or scaling MLP."""
    return parameter.ndim == 2 and ".blocks." in name and "ssmax" not in name and "ind_vectors" not in name


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> MuonAdamW:
    """Groups: hidden matrices (Muon, where chosen), other weights, and what is never decayed (vectors, biases)."""
    matrices, weights, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # rotary frequencies
            continue
        if config.name == "muon" and is_hidden_matrix(name, parameter):
            matrices.append(parameter)
        else:
            (weights if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "kind": "muon", "decayed": True},
        {"params": weights, "kind": "adamw", "decayed": True},
        {"params": vectors, "kind": "adamw", "decayed": False},
    ]
    return MuonAdamW([group for group in groups if group["params"]], config)
