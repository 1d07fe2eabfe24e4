"""Builds the optimizer of a run; ours are Muon for matrices and AdamW for the rest, as one with two kinds of groups.

An optimizer is any subclass of torch.optim.Optimizer that `register.optimizer` knows. Its groups of parameters have the
keys

lr            of the step, by the schedule of the stage
weight_decay  that of the stage, or 0 for vectors and biases; what it means is up to the optimizer
decayed       which of the two
kind          as its static method `kind_of(network, name, parameter)` says, "" without one

A step whose loss or gradient norm is not finite must leave weights and state unchanged. If `step` takes `taken`, a
tensor on the device says whether the step counts, and the gradients are zero if not; otherwise the host waits for the
device and calls `step` only if the step counts. Checkpoints hold `state_dict()`, so random numbers must not come from
torch's global generator, whose state they lack.

Both kinds of ours use the same learning rate, but for `adamw_factor`: the orthogonal update is scaled by
0.2 * sqrt(max(rows, columns)), which gives it the root mean square of an AdamW update (Moonlight, arXiv 2502.16982,
section 2.2; the TabICLv2 recipe does the same).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter, defaultdict
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.doors import register

# Quintic Newton-Schulz coefficients of Muon (Jordan et al. 2024): steepest at zero, singular values end in 0.7..1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
FEW_ROWS = 16  # matrices of at most so many rows are padded to one size: they are small, and of many shapes
TRIAL_SIZE = 8  # rows and columns of the matrix on which options are tried out
MEASURED_SIZE = 256  # of the one whose state is measured
# Options of ours that one kind of groups alone uses
KIND_OF_OPTION = {"momentum": "muon", "betas": "adamw", "eps": "adamw", "adamw_factor": "adamw"}
KIND_NAMES = {"muon": "Muon", "adamw": "AdamW"}


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

    Groups have a `kind` ("muon" or "adamw"), `lr` and `weight_decay` (decoupled, scaled by lr); for groups of AdamW, lr
    is multiplied by `adamw_factor`.
    """

    state_bytes: ClassVar[float] = 8  # of a weight: AdamW's two moments; Muon has one

    # Torch wraps these methods, and imports its compiler at the first call: 4 CPU seconds.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)

    def __init__(
        self,
        groups: list[dict],
        momentum: float = 0.9,
        betas: tuple[float, float] | list[float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_factor: float = 1.0,
    ) -> None:
        self.adamw_factor = adamw_factor
        self.momentum = momentum
        self.betas = tuple(betas)
        self.eps = eps
        self.rates: Tensor | None = None  # (groups, 2) on the device: rate, and rate times weight decay
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, taken: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        # taken: (), bool. Where it is False, weights and state stay unchanged, provided that the gradients are zero. It
        # is a tensor, so that the host need not wait for the device.
        self.set_rates()
        self.update(taken)

    def set_rates(self) -> None:
        """Copy the rates of all groups to the device, where `update` reads them."""
        rates = []
        for group in self.param_groups:
            rate = group["lr"] * (1.0 if group["kind"] == "muon" else self.adamw_factor)
            rates.append([rate, rate * group["weight_decay"]])
        if self.rates is None:
            self.rates = self.param_groups[0]["params"][0].new_empty(len(rates), 2)
        self.rates.copy_(torch.tensor(rates, dtype=self.rates.dtype, device="cpu"), non_blocking=True)

    @torch.no_grad()
    def update(self, taken: Tensor | None) -> None:
        """Update the parameters by the rates on the device; with the same parameters a CUDA graph can replay it."""
        # `counts` is `taken` as a factor, 1 or 0.
        assert self.rates is not None
        for group, (rate, decay) in zip(self.param_groups, self.rates, strict=True):
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            counts = trained[0].new_ones(()) if taken is None else taken.to(trained[0].dtype)
            if group["kind"] == "muon":
                self.move(trained, self.muon(trained, counts), rate, decay, counts)
            else:
                for parameters in self.by_steps_taken(trained):
                    self.move(parameters, self.adamw(parameters, counts), rate, decay, counts)

    def move(
        self, parameters: list[Tensor], updates: list[Tensor], rate: Tensor, decay: Tensor, counts: Tensor
    ) -> None:
        """Decay the parameters and subtract their updates; decay: the rate times the weight decay."""
        torch._foreach_mul_(parameters, 1 - decay * counts)
        torch._foreach_mul_(updates, rate * counts)
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
        # A vector counts as a matrix of one row, so it is normalized. A tensor of three or more dimensions, of a
        # plug-in's network, counts as the matrix of its first dimension and all others, as Muon's authors take the
        # kernels of convolutions (Jordan et al. 2024).
        matrices = [g.flatten(1) if g.ndim > 2 else g for g in gradients]

        # Newton-Schulz computes a stack of matrices at once. There is one stack for each shape, up to transposition,
        # one for all matrices of few rows and one for all vectors, padded with zeros, which change nothing. A stack for
        # each of their shapes took 1,300 kernel launches in a step of muon_all.
        vectors: list[int] = []
        stacks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, matrix in enumerate(matrices):
            rows = min(matrix.shape) if matrix.ndim == 2 else 1
            if rows == 1:
                vectors.append(i)
            elif rows <= FEW_ROWS:
                stacks[FEW_ROWS,].append(i)
            else:
                stacks[tuple(sorted(matrix.shape))].append(i)

        directions = list(matrices)
        if vectors:
            stack = orthogonalize(stack_vectors([matrices[i] for i in vectors]))
            for i, direction in zip(vectors, stack, strict=True):
                directions[i] = direction[0, : matrices[i].numel()].view(matrices[i].shape)
        for indices in stacks.values():
            stack = orthogonalize(stack_matrices([matrices[i] for i in indices]))
            for i, direction in zip(indices, stack, strict=True):
                rows, columns = matrices[i].shape
                if is_tall(matrices[i]):
                    direction = direction.mT
                directions[i] = direction[:rows, :columns].contiguous()
        torch._foreach_mul_(directions, [0.2 * math.sqrt(max(matrix.shape, default=1)) for matrix in matrices])
        return [direction.view(g.shape) for direction, g in zip(directions, gradients, strict=True)]

    def by_steps_taken(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Group parameters by the number of AdamW steps that they have taken."""
        # All parameters of a group share one tensor as their `taken`, so the groups are known without waiting for the
        # device, and a group has one bias correction. After a part has been unfrozen there are two or three groups.
        # `adamw` counts in place. So where parameters that take no step with these share the tensor, since they are
        # frozen or, after `load_state_dict`, of another group, these get a copy.
        no_steps = parameters[0].new_zeros(())
        groups: dict[Tensor, list[Tensor]] = defaultdict(list)  # by identity, as tensors are hashed
        for p in parameters:
            state = self.state[p]
            if "taken" not in state:
                state.update(taken=no_steps, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            groups[state["taken"]].append(p)
        sharing = Counter(id(state["taken"]) for state in self.state.values() if "taken" in state)
        for taken, members in groups.items():
            if sharing[id(taken)] > len(members):
                own = taken.clone()
                for p in members:
                    self.state[p]["taken"] = own
        return list(groups.values())

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state; see torch.optim.Optimizer."""
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        # Parameters with equal counts share a tensor again, see `by_steps_taken`.
        shared: dict[float, Tensor] = {}
        for state in self.state.values():
            if "taken" in state:
                state["taken"] = shared.setdefault(state["taken"].item(), state["taken"])

    def adamw(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """Compute the updates of AdamW; the parameters must have taken the same number of steps."""
        beta1, beta2 = self.betas
        states = [self.state[p] for p in parameters]
        taken = states[0]["taken"].add_(counts)  # that of all states
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        means = [state["mean"] for state in states]
        squares = [state["square"] for state in states]
        torch._foreach_mul_(means, 1 - counts * (1 - beta1))
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, 1 - counts * (1 - beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        steps = taken.double().clamp(min=1)  # 0 if the first step does not count
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - beta2**steps).sqrt().to(counts.dtype))
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_mul_(denominators, (1 - beta1**steps).to(counts.dtype))
        return list(torch._foreach_div(means, denominators))


def is_tall(x: Tensor) -> bool:
    return x.shape[0] > x.shape[1]


def stack_matrices(matrices: list[Tensor]) -> Tensor:
    """Stack matrices, transposed to rows <= columns and padded with zeros to one shape."""
    rows = max(min(m.shape) for m in matrices)
    columns = max(max(m.shape) for m in matrices)
    equal = []
    for m in matrices:
        if is_tall(m):
            m = m.mT
        if m.shape != (rows, columns):
            m = F.pad(m, (0, columns - m.shape[1], 0, rows - m.shape[0]))
        equal.append(m)
    return torch.stack(equal)


def stack_vectors(vectors: list[Tensor]) -> Tensor:
    """Stack vectors, and matrices of one row or column, padded with zeros, (K, 1, longest)."""
    flat = [v.reshape(-1) for v in vectors]
    stack = flat[0].new_zeros(len(flat), 1, max(map(len, flat)))
    places = [row[0, : len(v)] for row, v in zip(stack, flat, strict=True)]
    torch._foreach_copy_(places, flat)
    return stack


class Muon(MuonAdamW):
    """Muon for the hidden matrices of a network, AdamW for the rest."""

    @staticmethod
    def kind_of(network: Any, name: str, parameter: nn.Parameter) -> str:
        """Return the kind of group of a parameter; network: a `model.family.Network`, which says what is hidden."""
        return "muon" if network.is_hidden_matrix(name, parameter) else "adamw"


class MuonAll(MuonAdamW):
    """Muon for everything, as published for TabICLv2, except single numbers, of which it would take the sign."""

    @staticmethod
    def kind_of(network: Any, name: str, parameter: nn.Parameter) -> str:
        """Return the kind of group of a parameter."""
        return "adamw" if parameter.ndim == 0 else "muon"


class AdamW(MuonAdamW):
    """AdamW for everything."""

    @staticmethod
    def kind_of(network: Any, name: str, parameter: nn.Parameter) -> str:
        """Return the kind of group of all parameters."""
        return "adamw"


REPLAYED = (Muon, MuonAll, AdamW)  # whose steps a CUDA graph can replay


def build_optimizer(network: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Build an optimizer with groups by kind and by decay: matrices are decayed, vectors and biases are not.

    Parameters
    ----------
    network : Network
        Whose parameters are trained.
    config : object
        The name of the optimizer and its options, see training/optimizer_settings.py.

    Returns
    -------
    torch.optim.Optimizer
        Without state.
    """
    entry = register.optimizer[config.name].optimizer
    groups: dict[tuple[str, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:  # rotary frequencies
            continue
        kind = entry.kind_of(network, name, parameter) if hasattr(entry, "kind_of") else ""
        decayed = parameter.ndim >= 2
        groups[kind, decayed].append(parameter)
    # The order decides which state in a checkpoint belongs to which parameter: muon before adamw, matrices first.
    described = []
    for kind, decayed in sorted(groups, reverse=True):
        described.append({"params": groups[kind, decayed], "kind": kind, "decayed": decayed})
    return entry(described, **optimizer_arguments(entry, config))


def optimizer_arguments(entry: Any, config: Any) -> dict[str, Any]:
    """Return the options of an optimizer as its class takes them: a list as a tuple if that is the default."""
    parameters = inspect.signature(entry).parameters
    arguments = {}
    for option in dataclasses.fields(config):
        if option.name == "name":
            continue
        value = getattr(config, option.name)
        if option.name in parameters and isinstance(parameters[option.name].default, tuple):
            value = tuple(value)
        arguments[option.name] = value
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        arguments["lr"] = 1e-3  # each step sets its own
    return arguments


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has `step(taken)`."""
    return "taken" in inspect.signature(optimizer.step).parameters


def is_function_of_tensors(optimizer: torch.optim.Optimizer) -> TypeGuard[MuonAdamW]:
    """Whether `set_rates` and `update` may replace `step`: for ours, if nobody has registered a hook."""
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in REPLAYED and not has_hooks


def take_step(optimizer: torch.optim.Optimizer, taken: Tensor) -> None:
    """Take a step, unless `taken`, (), is False: weights and state then stay as they are."""
    if decides_on_device(optimizer):
        optimizer.step(taken=taken)  # type: ignore[call-overload]
    elif taken.item():  # waits for the device
        optimizer.step()


class OneMatrix(nn.Module):
    """A matrix of zeros with gradients, on which an optimizer is tried out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size, device="cpu"))
        self.weight.grad = torch.ones_like(self.weight)

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """See `model.family.Network`."""
        return True


def try_out(config: Any, size: int = TRIAL_SIZE) -> torch.optim.Optimizer:
    """Build an optimizer for one matrix, and take a step; an optimizer may raise any error there."""
    optimizer = build_optimizer(OneMatrix(size), config)
    take_step(optimizer, torch.ones((), dtype=torch.bool))
    return optimizer


def state_bytes(config: Any) -> float:
    """Return the bytes of state for each weight: as the class says, or as a matrix has them after a step."""
    entry = register.optimizer[config.name].optimizer
    if hasattr(entry, "state_bytes"):
        return entry.state_bytes
    total = 0
    for state in try_out(config, MEASURED_SIZE).state.values():
        total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total / MEASURED_SIZE**2


def optimizer_remarks(network: Any, optimizer: torch.optim.Optimizer, name: str, has_decay: bool) -> list[str]:
    """Return what a run says at its start about how an optimizer takes a network.

    Parameters
    ----------
    network : Network
        The network.
    optimizer : torch.optim.Optimizer
        Its optimizer.
    name : str
        What the configuration calls it.
    has_decay : bool
        Whether a stage has weight decay.

    Returns
    -------
    list of str
        One line each; none for ours with a network that says which of its matrices are hidden.
    """
    lines = []
    sizes: dict[str, int] = defaultdict(int)
    for group in optimizer.param_groups:
        sizes[group.get("kind", "")] += sum(parameter.numel() for parameter in group["params"])
    if isinstance(optimizer, Muon) and not sizes["muon"]:
        lines.append(
            f"warning   optimizer={name} finds no hidden matrix in this network, so AdamW takes all "
            f"{sizes['adamw']:,} weights; its method is_hidden_matrix says which matrices are hidden"
        )
    elif isinstance(optimizer, Muon) and not network.declares_hidden_matrices():
        lines.append(
            f"optimizer {name} takes {sizes['muon']:,} weights of matrices, AdamW the other {sizes['adamw']:,}; the "
            "network has no is_hidden_matrix of its own"
        )
    if type(optimizer) in (Muon, MuonAll, AdamW):  # a subclass of a plug-in may have other kinds and defaults
        defaults = inspect.signature(MuonAdamW).parameters
        for option, kind in KIND_OF_OPTION.items():
            if not sizes[kind] and getattr(optimizer, option) != defaults[option].default:
                why = f"since optimizer={name} uses {KIND_NAMES[kind]} for no weight"
                lines.append(f"warning   optimizer.{option} has no effect, {why}")
    if not decides_on_device(optimizer):
        lines.append(f"optimizer {name} has no step(taken), so each step waits for the device")
    for key, what in (("lr", "the learning rate"), ("weight_decay", "the weight decay")):
        if key not in optimizer.defaults and (key == "lr" or has_decay):
            lines.append(f"warning   the optimizer {name} has no {key}: {what} of the stages has no effect")
    return lines
