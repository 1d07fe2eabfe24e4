"""Builds the optimizer of a run. The built-in ones apply Muon to matrices and AdamW to the other parameters.

An optimizer is any subclass of torch.optim.Optimizer that is registered by `register.optimizer`. Its parameter groups
have the keys

lr            the learning rate of the step, from the schedule of the stage
weight_decay  that of the stage, or 0 for vectors and biases; what it means is up to the optimizer
decayed       whether weight_decay is that of the stage
kind          what the optimizer's static method `kind_of(network, name, parameter)` returns, "" without such a method

A step whose loss or gradient norm is not finite must leave weights and state unchanged. An optimizer whose `step` has a
parameter `taken` gets a tensor on the device that says whether the step counts; the gradients are zero if it does not.
For other optimizers the host waits for the device, and calls `step` only if the step counts. A checkpoint holds
`state_dict()` but no state of random generators, so an optimizer must not rely on torch's global generator.

Muon and AdamW share one learning rate, up to the factor `adamw_factor`, since Muon's update is scaled to the root mean
square of an AdamW update, see `MuonAdamW`.
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
FEW_ROWS = 16  # matrices with at most this many rows are padded to one size: they are small, and have many shapes
TRIAL_SIZE = 8  # rows and columns of the matrix on which options are tried
MEASURED_SIZE = 256  # rows and columns of the matrix whose optimizer state is measured
# Options of the built-in optimizers that only one kind of group uses.
KIND_OF_OPTION = {"momentum": "muon", "betas": "adamw", "eps": "adamw", "adamw_factor": "adamw"}
KIND_NAMES = {"muon": "Muon", "adamw": "AdamW"}


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices by moving all singular values close to 1.

    Each iteration computes ``X <- a X + (b A + c A A) X`` with ``A = X X^T``.

    Parameters
    ----------
    matrices : Tensor
        (K, rows, columns) with rows <= columns. On a GPU, `trainer.tf32` makes products of float32 fast.

    Returns
    -------
    Tensor
        (K, rows, columns) of the same dtype, with singular values of about 0.7 to 1.2.

    References
    ----------
    Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon.
    """
    a, b, c = NEWTON_SCHULZ
    # The Frobenius norm bounds the largest singular value, and the iteration needs values of at most 1. 1e-7 avoids a
    # division by zero.
    X = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        A = X @ X.mT  # (K, rows, rows)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer; a tensor on the device decides whether a step is skipped.

    Both decay a parameter p and subtract an update u of the gradient g, ``p <- (1 - lr * weight_decay) p - lr * u``:

    Muon
        ``m <- momentum * m + (1 - momentum) g`` and ``n = momentum * m + (1 - momentum) g`` (Nesterov), then
        ``u = 0.2 sqrt(max(rows, columns)) O(n)``, where O is `orthogonalize`. The factor gives u the root mean square
        of an AdamW update, so that both kinds can share a learning rate; the TabICLv2 recipe does the same.
    AdamW
        ``m <- beta1 m + (1 - beta1) g`` and ``v <- beta2 v + (1 - beta2) g^2``, then, after t steps,
        ``u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)``.

    Parameters
    ----------
    groups : list of dict
        Parameter groups, each with its `kind`: "muon" or "adamw". Steps use the `lr` and `weight_decay` of a group.
    momentum : float
        Momentum of Muon.
    betas : (float, float)
        Decay rates beta1 and beta2 of AdamW.
    eps : float
        Added to the denominator of AdamW.
    adamw_factor : float
        Multiplies lr in groups of AdamW.

    References
    ----------
    Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon.

    Liu et al., Muon is scalable for LLM training (Moonlight), arXiv 2502.16982, section 2.2 (the factor of the update).

    Loshchilov and Hutter, Decoupled weight decay regularization (AdamW), arXiv 1711.05101.
    """

    state_bytes: ClassVar[float] = 8  # of state for each weight: AdamW's two moments; Muon has one

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
        """Update the parameters that have gradients.

        Parameters
        ----------
        taken : Tensor, optional
            (), bool. If it is False and the gradients are zero, weights and state stay unchanged. It is a tensor so
            that the host need not wait for the device. By default the step is taken.
        """
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
        """Update the parameters with the rates on the device.

        A CUDA graph can replay this as long as the same parameters have gradients.

        Parameters
        ----------
        taken : Tensor or None
            See `step`.
        """
        assert self.rates is not None
        for group, (rate, decay) in zip(self.param_groups, self.rates, strict=True):
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            # `taken` as a factor, 1 or 0.
            counts = trained[0].new_ones(()) if taken is None else taken.to(trained[0].dtype)
            if group["kind"] == "muon":
                self.move(trained, self.muon(trained, counts), rate, decay, counts)
            else:
                for parameters in self.by_steps_taken(trained):
                    self.move(parameters, self.adamw(parameters, counts), rate, decay, counts)

    def move(
        self, parameters: list[Tensor], updates: list[Tensor], rate: Tensor, decay: Tensor, counts: Tensor
    ) -> None:
        """Decay the parameters and subtract their updates.

        Parameters
        ----------
        parameters, updates : list of Tensor
            The parameters, and the update of each; both are changed.
        rate, decay : Tensor
            (), the learning rate, and the learning rate times the weight decay.
        counts : Tensor
            (), 1 if the step is taken, 0 if it is skipped.
        """
        torch._foreach_mul_(parameters, 1 - decay * counts)
        torch._foreach_mul_(updates, rate * counts)
        torch._foreach_sub_(parameters, updates)

    def muon(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """Compute the updates of Muon: Nesterov momentum, orthogonalized; see the formula of the class."""
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        momenta = [self.state[p]["momentum"] for p in parameters]
        # In a skipped step the factor is 1 and the gradients are zero, so the momenta stay as they are.
        torch._foreach_mul_(momenta, 1 - counts * (1 - self.momentum))
        torch._foreach_add_(momenta, gradients, alpha=1 - self.momentum)
        nesterov = torch._foreach_lerp(gradients, momenta, self.momentum)
        return self.orthogonal(nesterov)

    def orthogonal(self, gradients: tuple[Tensor, ...]) -> list[Tensor]:
        """Compute orthogonal directions, with the root mean square of an AdamW update."""
        # A vector counts as a matrix with one row, so it is normalized. A tensor of three or more dimensions, in a
        # network of a plug-in, is flattened to a matrix that keeps the first dimension, as Muon's authors do with
        # convolution kernels (Jordan et al. 2024).
        matrices = [g.flatten(1) if g.ndim > 2 else g for g in gradients]

        # Newton-Schulz computes a stack of matrices at once. There is one stack for each shape, up to transposition.
        # All matrices with few rows share one, and so do all vectors, padded with zeros, which change nothing: one
        # stack for each of their shapes took 1,300 kernel launches in a step of muon_all.
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

        # Orthogonalize each stack, and cut the padding off.
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
        # Scale to the root mean square of AdamW, about 0.2 (Moonlight, arXiv 2502.16982, section 2.2).
        torch._foreach_mul_(directions, [0.2 * math.sqrt(max(matrix.shape, default=1)) for matrix in matrices])
        return [direction.view(g.shape) for direction, g in zip(directions, gradients, strict=True)]

    def by_steps_taken(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Group parameters by the number of AdamW steps that they have taken.

        Each group has one bias correction. The states of its parameters share a tensor `taken`, so the groups are known
        without waiting for the device. After a part of the network has been unfrozen there are two or three groups.
        """
        no_steps = parameters[0].new_zeros(())
        groups: dict[Tensor, list[Tensor]] = defaultdict(list)  # by identity, as tensors are hashed
        for p in parameters:
            state = self.state[p]
            if "taken" not in state:
                state.update(taken=no_steps, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            groups[state["taken"]].append(p)

        # `adamw` counts in place. Parameters that do not take this step may share the tensor: they are frozen, or in
        # another parameter group after `load_state_dict`. Then those that take it get a copy.
        sharing = Counter(id(state["taken"]) for state in self.state.values() if "taken" in state)
        for taken, members in groups.items():
            if sharing[id(taken)] > len(members):
                copy = taken.clone()
                for p in members:
                    self.state[p]["taken"] = copy
        return list(groups.values())

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state; see torch.optim.Optimizer."""
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        # Let parameters with equal counts share a tensor again, see `by_steps_taken`.
        shared: dict[float, Tensor] = {}
        for state in self.state.values():
            if "taken" in state:
                state["taken"] = shared.setdefault(state["taken"].item(), state["taken"])

    def adamw(self, parameters: list[Tensor], counts: Tensor) -> list[Tensor]:
        """Compute the updates of AdamW, see the formula of the class.

        Parameters
        ----------
        parameters : list of Tensor
            Parameters that have taken the same number of steps.
        counts : Tensor
            (), 1 if the step is taken, 0 if it is skipped.

        Returns
        -------
        list of Tensor
            The update of each parameter.
        """
        beta1, beta2 = self.betas
        states = [self.state[p] for p in parameters]
        taken = states[0]["taken"].add_(counts)  # that of all states
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        means = [state["mean"] for state in states]
        squares = [state["square"] for state in states]

        # The moments. In a skipped step the factors are 1 and the gradients are zero, so they stay as they are.
        torch._foreach_mul_(means, 1 - counts * (1 - beta1))
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, 1 - counts * (1 - beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

        # The denominators, times the bias correction of the mean: one division of the means is then enough.
        # 0 if the first step does not count.
        steps = taken.double().clamp(min=1)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - beta2**steps).sqrt().to(counts.dtype))
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_mul_(denominators, (1 - beta1**steps).to(counts.dtype))
        return list(torch._foreach_div(means, denominators))


def is_tall(x: Tensor) -> bool:
    return x.shape[0] > x.shape[1]


def stack_matrices(matrices: list[Tensor]) -> Tensor:
    """Stack matrices, transposed to rows <= columns and padded with zeros to one shape, (K, rows, columns)."""
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
        """Return the kind of group of a parameter: "muon" if the network calls it a hidden matrix, else "adamw"."""
        return "muon" if network.is_hidden_matrix(name, parameter) else "adamw"


class MuonAll(MuonAdamW):
    """Muon for everything, as published for TabICLv2, except for scalars, where it would reduce to the sign."""

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


REPLAYED = (Muon, MuonAll, AdamW)  # optimizers whose steps a CUDA graph can replay


def build_optimizer(network: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Build an optimizer with groups by kind and by decay: matrices are decayed, vectors and biases are not.

    Parameters
    ----------
    network : Network
        The network to train.
    config : object
        The name of the optimizer and its options, see training/optimizer_settings.py.

    Returns
    -------
    torch.optim.Optimizer
        The optimizer, without state.
    """
    entry = register.optimizer[config.name].optimizer

    # Group the parameters. Without a `kind_of`, the optimizer has one kind.
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
    """Return the options of an optimizer as its class takes them: a list becomes a tuple if the default is one."""
    parameters = inspect.signature(entry).parameters
    arguments = {}
    for option in dataclasses.fields(config):
        if option.name == "name":
            continue
        value = getattr(config, option.name)
        if option.name in parameters and isinstance(parameters[option.name].default, tuple):
            value = tuple(value)
        arguments[option.name] = value
    # A class may demand a learning rate. Any will do, since each step sets its own.
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        arguments["lr"] = 1e-3
    return arguments


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has `step(taken)`."""
    return "taken" in inspect.signature(optimizer.step).parameters


def is_function_of_tensors(optimizer: torch.optim.Optimizer) -> TypeGuard[MuonAdamW]:
    """Whether `set_rates` and `update` may replace `step`: for a built-in optimizer without hooks."""
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in REPLAYED and not has_hooks


def take_step(optimizer: torch.optim.Optimizer, taken: Tensor) -> None:
    """Take a step, or leave weights and state unchanged if `taken`, a tensor of shape (), is False."""
    if decides_on_device(optimizer):
        optimizer.step(taken=taken)  # type: ignore[call-overload]
    elif taken.item():  # waits for the device
        optimizer.step()


class OneMatrix(nn.Module):
    """A matrix of zeros with gradients, on which an optimizer is tried."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size, device="cpu"))
        self.weight.grad = torch.ones_like(self.weight)

    def is_hidden_matrix(self, name: str, parameter: nn.Parameter) -> bool:
        """See `model.family.Network`."""
        return True


def try_out(config: Any, size: int = TRIAL_SIZE) -> torch.optim.Optimizer:
    """Build an optimizer for one matrix and take a step; an optimizer of a plug-in may raise any error here."""
    optimizer = build_optimizer(OneMatrix(size), config)
    take_step(optimizer, torch.ones((), dtype=torch.bool))
    return optimizer


def state_bytes(config: Any) -> float:
    """Return the bytes of optimizer state per weight, declared by the class or measured on a matrix after one step."""
    entry = register.optimizer[config.name].optimizer
    if hasattr(entry, "state_bytes"):
        return entry.state_bytes
    total = 0
    for state in try_out(config, MEASURED_SIZE).state.values():
        total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total / MEASURED_SIZE**2


def optimizer_remarks(network: Any, optimizer: torch.optim.Optimizer, name: str, has_decay: bool) -> list[str]:
    """Return what a run prints at its start about the optimizer and its network.

    Parameters
    ----------
    network : Network
        The network.
    optimizer : torch.optim.Optimizer
        Its optimizer.
    name : str
        The optimizer's name in the configuration.
    has_decay : bool
        Whether a stage has weight decay.

    Returns
    -------
    list of str
        Lines to print; none for a built-in optimizer with a network that declares its hidden matrices.
    """
    lines = []

    # Which weights Muon takes, where the network does not declare them.
    sizes: dict[str, int] = defaultdict(int)
    for group in optimizer.param_groups:
        sizes[group.get("kind", "")] += sum(parameter.numel() for parameter in group["params"])
    if isinstance(optimizer, Muon) and not sizes["muon"]:
        lines.append(
            f"warning   optimizer={name} finds no hidden matrix in this network, so AdamW takes all "
            f"{sizes['adamw']:,} weights; define is_hidden_matrix to declare the hidden matrices"
        )
    elif isinstance(optimizer, Muon) and not network.declares_hidden_matrices():
        lines.append(
            f"optimizer {name} takes {sizes['muon']:,} weights of matrices, AdamW the other {sizes['adamw']:,}; the "
            "network does not define is_hidden_matrix"
        )

    # Settings without effect. A subclass in a plug-in may have other kinds and defaults.
    if type(optimizer) in (Muon, MuonAll, AdamW):
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
