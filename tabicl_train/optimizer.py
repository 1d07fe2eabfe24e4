"""Muon for matrices and AdamW for the rest, as one optimizer with two kinds of parameter groups.

Both kinds use the same learning rate: the orthogonal update is scaled by 0.2 * sqrt(max(rows, columns)), which gives it
the root mean square of an AdamW update (Moonlight, arXiv 2502.16982, section 2.2; the TabICLv2 recipe does the same).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.errors import ConfigError

# Quintic Newton-Schulz coefficients of Muon (Jordan et al. 2024): steepest at zero, singular values end in 0.7..1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
FEW_ROWS = 16  # matrices of at most so many rows are padded to one size: they are small, and of many shapes


class Settings(Protocol):
    """The settings of an optimizer, see `config.schema.OptimizerConfig`, which asks this file for its names."""

    name: str
    momentum: float
    betas: list[float]
    eps: float
    cautious_weight_decay: bool


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices: move all singular values of (K, rows, columns) close to 1."""
    # Needs rows <= columns. The dtype is that of the matrices; on a GPU, `trainer.tf32` makes fp32 fast.
    a, b, c = NEWTON_SCHULZ
    X = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        A = X @ X.mT  # (K, rows, rows)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW; a tensor on the device decides whether a step is skipped.

    Groups have a `kind` ("muon" or "adamw"), `lr` and `weight_decay` (decoupled, scaled by lr). Cautious weight decay
    (arXiv 2510.12402) skips the weights that the update itself moves away from zero.
    """

    def __init__(self, groups: list[dict], config: Settings) -> None:
        self.momentum = config.momentum
        self.betas, self.eps = tuple(config.betas), config.eps
        self.cautious = config.cautious_weight_decay
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, taken: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        # taken: (), bool. Where it is False, weights and state stay unchanged, provided that the gradients are zero. It
        # is a tensor, so that the host need not wait for the device.
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            counts = trained[0].new_ones(()) if taken is None else taken.to(trained[0].dtype)
            if group["kind"] == "muon":
                self.move(trained, self.muon(trained, counts), group, counts)
            else:
                for parameters in self.by_steps_taken(trained):
                    self.move(parameters, self.adamw(parameters, counts), group, counts)

    def move(self, parameters: list[Tensor], updates: list[Tensor], group: dict, counts: Tensor) -> None:
        """Decay the parameters and subtract their updates."""
        decay = group["lr"] * group["weight_decay"] * counts
        if self.cautious:
            factors = torch._foreach_mul(parameters, updates)
            torch._foreach_sign_(factors)
            torch._foreach_clamp_min_(factors, 0.0)  # 1 for weights to decay, 0 for others
            torch._foreach_mul_(factors, -decay)
            torch._foreach_add_(factors, 1.0)
            torch._foreach_mul_(parameters, factors)
        else:
            torch._foreach_mul_(parameters, 1 - decay)
        torch._foreach_mul_(updates, group["lr"] * counts)
        torch._foreach_sub_(parameters, updates)

    def muon(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """Compute the updates of Muon: Nesterov momentum, orthogonalized."""
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_mul_(momenta, 1 - counts * (1 - self.momentum))
        torch._foreach_add_(momenta, gradients, alpha=1 - self.momentum)
        nesterov = torch._foreach_lerp(gradients, momenta, self.momentum)
        return self.orthogonal(nesterov)

    def orthogonal(self, gradients: tuple[Tensor, ...]) -> list[Tensor]:
        """Compute orthogonal directions, with the root mean square of an AdamW update."""
        # A vector counts as a matrix of one row, so it is normalized. Matrices of the same shape, up to transposition,
        # go through Newton-Schulz in one stack, and so do all vectors and all matrices of few rows, padded with zeros,
        # which change nothing. A stack for each shape took 1,300 kernel launches in a step of muon_all.
        kinds: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by shape; () are vectors
        for i, g in enumerate(gradients):
            rows = min(g.shape) if g.ndim == 2 else 1
            kinds[() if rows == 1 else (FEW_ROWS,) if rows <= FEW_ROWS else tuple(sorted(g.shape))].append(i)
        directions = list(gradients)
        for kind, indices in kinds.items():
            some = [gradients[i] for i in indices]
            stack = stack_matrices(some) if kind else stack_vectors(some)
            stack = orthogonalize(stack)
            for i, direction, g in zip(indices, stack, some, strict=True):
                if kind:
                    direction = (direction.mT if is_tall(g) else direction)[: g.shape[0], : g.shape[1]].contiguous()
                directions[i] = direction if kind else direction[0, : g.numel()].view(g.shape)
        torch._foreach_mul_(directions, [0.2 * math.sqrt(max(g.shape, default=1)) for g in gradients])
        return directions

    def by_steps_taken(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Group parameters by the number of AdamW steps that they have taken."""
        # All parameters of a group share one tensor as their `taken`, so the groups are known without waiting for the
        # device, and a group has one bias correction. After a part has been unfrozen there are two or three groups.
        sets, no_steps = defaultdict(list), parameters[0].new_zeros(())
        for p in parameters:
            if "taken" not in self.state[p]:
                self.state[p].update(taken=no_steps, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            sets[self.state[p]["taken"]].append(p)
        return list(sets.values())

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state; see torch.optim.Optimizer."""
        super().load_state_dict(state_dict)
        shared: dict[float, Tensor] = {}
        for state in self.state.values():
            if "taken" in state:
                state["taken"] = shared.setdefault(state["taken"].item(), state["taken"])

    def adamw(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """Compute the updates of AdamW; the parameters must have taken the same number of steps."""
        beta1, beta2 = self.betas
        states = [self.state[p] for p in parameters]
        taken = states[0]["taken"] + counts  # a new tensor: frozen parameters keep the old one
        for state in states:
            state["taken"] = taken
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        means, squares = [state["mean"] for state in states], [state["square"] for state in states]
        torch._foreach_mul_(means, 1 - counts * (1 - beta1))
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, 1 - counts * (1 - beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        taken = taken.double().clamp(min=1)  # 0 if the first step does not count
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - beta2**taken).sqrt().to(counts.dtype))
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_mul_(denominators, (1 - beta1**taken).to(counts.dtype))
        return list(torch._foreach_div(means, denominators))


def is_tall(x: Tensor) -> bool:
    return x.shape[0] > x.shape[1]


def stack_matrices(matrices: list[Tensor]) -> Tensor:
    """Stack matrices, transposed to rows <= columns and padded with zeros to one shape."""
    wide = [m.mT if is_tall(m) else m for m in matrices]
    rows, columns = (max(sizes) for sizes in zip(*(m.shape for m in wide), strict=True))
    missing = [(0, columns - m.shape[1], 0, rows - m.shape[0]) for m in wide]
    return torch.stack([F.pad(m, by) if any(by) else m for m, by in zip(wide, missing, strict=True)])


def stack_vectors(vectors: list[Tensor]) -> Tensor:
    """Stack vectors, and matrices of one row or column, padded with zeros, (K, 1, longest)."""
    flat = [v.reshape(-1) for v in vectors]
    stack = flat[0].new_zeros(len(flat), 1, max(map(len, flat)))
    torch._foreach_copy_([row[0, : len(v)] for row, v in zip(stack, flat, strict=True)], flat)
    return stack


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon optimizes it: matrices of the blocks, but no embedding, head, inducing vector or scaling MLP."""
    in_block = ".blocks." in name or name.startswith("transformer.")  # of a TabICL, of a sequence model
    return parameter.ndim == 2 and in_block and "ssmax" not in name and "ind_vectors" not in name


# The optimizers, by name: which parameters Muon takes.
OPTIMIZERS: dict[str, Callable[[str, nn.Parameter], bool]] = {
    "muon": is_hidden_matrix,
    "muon_all": lambda name, parameter: True,
    "adamw": lambda name, parameter: False,
}


def build_optimizer(model: nn.Module, config: Settings) -> MuonAdamW:
    """Build an optimizer with groups by kind and by decay: matrices are decayed, vectors and biases are not."""
    if config.name not in OPTIMIZERS:
        raise ConfigError([f"there is no optimizer {config.name!r}; there are {', '.join(OPTIMIZERS)}"])
    groups: dict[tuple[str, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # rotary frequencies
            continue
        uses_muon = OPTIMIZERS[config.name](name, parameter)
        groups["muon" if uses_muon else "adamw", parameter.ndim >= 2].append(parameter)
    order = [("muon", True), ("muon", False), ("adamw", True), ("adamw", False)]
    return MuonAdamW(
        [{"params": groups[key], "kind": key[0], "decayed": key[1]} for key in order if key in groups], config
    )
