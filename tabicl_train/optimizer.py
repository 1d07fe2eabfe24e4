"""Muon for matrices and AdamW for the rest, as one optimiser with two kinds of parameter groups.

It is one optimiser because Lightning counts the steps of each. Both kinds use the same learning rate: the orthogonal
update is scaled by 0.2 * sqrt(max(rows, columns)), which gives it the root mean square of an AdamW update (Moonlight,
arXiv 2502.16982, section 2.2; the TabICLv2 recipe does the same).
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from tabicl_train.config.schema import OptimizerConfig

# Quintic Newton-Schulz coefficients of Muon (Jordan et al. 2024): steepest at zero, singular values end in 0.7..1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate nearest semi-orthogonal matrices: all singular values are moved close to 1.

    matrices: (K, rows, columns), any dtype; the computation is in `dtype`
    """
    a, b, c = NEWTON_SCHULZ
    X = matrices.to(dtype)
    tall = X.size(1) > X.size(2)
    X = X.mT if tall else X
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).to(matrices.dtype)


def newton_schulz_dtype(setting: str, on_cuda: bool) -> torch.dtype:
    """auto: bf16 on a GPU, where it is faster; fp32 on a CPU, where bf16 is slower."""
    return torch.bfloat16 if setting == "bf16" or (setting == "auto" and on_cuda) else torch.float32


class MuonAdamW(torch.optim.Optimizer):
    """Parameter groups have `kind` ("muon" or "adamw"), `lr` and `weight_decay` (decoupled, scaled by lr).

    Cautious weight decay (arXiv 2510.12402) skips the weights that the update itself moves away from zero.
    """

    def __init__(self, groups: list[dict], config: OptimizerConfig) -> None:
        self.momentum, self.steps = config.momentum, config.newton_schulz_steps
        self.betas, self.eps = tuple(config.betas), config.eps
        self.cautious = config.cautious_weight_decay
        self.newton_schulz_dtype = config.newton_schulz_dtype
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None, taken: Tensor | None = None):
        """taken: (), bool, whether the step counts. If not, weights and state stay unchanged, provided that the
        gradients are zero. It is a tensor, so that the host need not wait for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss

    def move(self, parameters: list[Tensor], updates: list[Tensor], group: dict, counts: Tensor) -> None:
        """Decay the parameters and subtract their updates."""
        decay = group["lr"] * group["weight_decay"] * counts
        if self.cautious:
            signs = torch._foreach_mul(parameters, updates)
            torch._foreach_mul_(parameters, [1 - decay * (s > 0) for s in signs])
        else:
            torch._foreach_mul_(parameters, 1 - decay)
        torch._foreach_mul_(updates, group["lr"] * counts)
        torch._foreach_sub_(parameters, updates)

    def muon(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """Nesterov momentum, orthogonalised; matrices of the same shape go through Newton-Schulz together.

        A vector counts as a matrix of one row, so its update is a normalised direction.
        """
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_mul_(momenta, 1 - counts * (1 - self.momentum))
        torch._foreach_add_(momenta, gradients, alpha=1 - self.momentum)
        nesterov = torch._foreach_lerp(gradients, momenta, self.momentum)
        by_shape = defaultdict(list)
        for i, p in enumerate(parameters):
            by_shape[p.shape].append(i)
        dtype = newton_schulz_dtype(self.newton_schulz_dtype, parameters[0].is_cuda)
        updates = list(nesterov)
        for shape, indices in by_shape.items():
            matrices = torch.stack([nesterov[i].view(1, -1) if len(shape) < 2 else nesterov[i] for i in indices])
            directions = orthogonalise(matrices, self.steps, dtype).mul_(0.2 * math.sqrt(max(matrices.shape[1:])))
            for i, direction in zip(indices, directions.unbind(), strict=True):
                updates[i] = direction.view(shape)
        return updates

    def by_steps_taken(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Sets of parameters that have taken the same number of AdamW steps.

        All parameters of a set share one tensor as their `taken`, so the sets are known without waiting for the device,
        and a set has one bias correction. After a part has been unfrozen there are two or three sets.
        """
        sets, no_steps = defaultdict(list), parameters[0].new_zeros(())
        for p in parameters:
            if "taken" not in self.state[p]:
                self.state[p].update(taken=no_steps, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            sets[self.state[p]["taken"]].append(p)
        return list(sets.values())

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        shared: dict[float, Tensor] = {}
        for state in self.state.values():
            if "taken" in state:
                state["taken"] = shared.setdefault(state["taken"].item(), state["taken"])

    def adamw(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """The updates of AdamW; the parameters must have taken the same number of steps."""
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


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon optimises it: matrices of the blocks, but no embedding, head, inducing vector or scaling MLP."""
    return parameter.ndim == 2 and ".blocks." in name and "ssmax" not in name and "ind_vectors" not in name


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> MuonAdamW:
    """The optimiser, with groups by kind and by decay: matrices are decayed, vectors and biases never."""
    groups: dict[tuple[str, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # rotary frequencies
            continue
        uses_muon = config.name == "muon_all" or (config.name == "muon" and is_hidden_matrix(name, parameter))
        groups["muon" if uses_muon else "adamw", parameter.ndim >= 2].append(parameter)
    order = [("muon", True), ("muon", False), ("adamw", True), ("adamw", False)]
    return MuonAdamW(
        [{"params": groups[key], "kind": key[0], "decayed": key[1]} for key in order if key in groups], config
    )
