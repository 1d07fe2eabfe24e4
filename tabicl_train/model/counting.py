"""What a table costs in a network that has no formulas of its own: counted once, on small tables.

FLOPs are counted by torch, and values are those that autograd saves for the backward pass. Both are fitted by a
polynomial in N rows, n labeled rows and M features. Counts are no times, so they are the same on every machine with the
same version of torch. A run keeps those of its first start, see run_dir/costs.py, so that the division of tables among
ranks and packs stays equal when it is resumed, with another version of torch too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tabicl_train.model.pack import Pack, Shape

__all__ = ["Costs", "counted_costs", "use_costs"]

# Shapes N, n, M on which costs are counted; in the terms below they are far from a common surface.
SPLITS = ((6, 2), (6, 4), (11, 3), (11, 8), (17, 5), (17, 13), (24, 6), (24, 19))
SHAPES = tuple((N, n, M) for N, n in SPLITS for M in (1, 2, 4, 7))
_counted: dict[tuple[type, str], Costs] = {}  # by network and settings
DIGITS = 6  # significant digits of a coefficient; rounding of the fit is far below


@dataclass(frozen=True)
class Costs:
    """Polynomials of the costs of a table.

    Parameters
    ----------
    flops : tuple of float
        Coefficients of the FLOPs of a forward pass, in the order of `terms`.
    kept : tuple of float
        Coefficients of the values kept for the backward pass.
    """

    flops: tuple[float, ...]
    kept: tuple[float, ...]

    def forward_flops(self, num_rows: int, train_size: int, num_features: int) -> float:
        """Return the FLOPs of one table's forward pass."""
        return evaluate(self.flops, num_rows, train_size, num_features)

    def kept_values(self, num_rows: int, train_size: int, num_features: int) -> float:
        """Return the values of one table that are kept for the backward pass."""
        return evaluate(self.kept, num_rows, train_size, num_features)


def terms(N: int, n: int, M: int) -> list[float]:
    """Return the terms of the polynomials: what layers over cells, rows and columns cost, and attention among them."""
    q = N - n
    return [1, N, n, M, N * M, n * M, N * n, N * N, N * n * M, q * q, N * N * M, n * n * M, N * M * M, n * M * M]


def evaluate(coefficients: tuple[float, ...], N: int, n: int, M: int) -> float:
    value = sum(coefficient * term for coefficient, term in zip(coefficients, terms(N, n, M), strict=True))
    return max(value, float(N * M))  # as the fit of a network with other terms may fall below zero


def counted_costs(network: type[nn.Module], config: Any) -> Costs:
    """Count the costs of the networks of a class with these settings.

    Parameters
    ----------
    network : type
        A subclass of `family.Network`.
    config : NetworkConfig
        Its settings.

    Returns
    -------
    Costs
    """
    key = (network, repr(config))
    if key not in _counted:
        _counted[key] = count_on_small_tables(network, config)
    return _counted[key]


def use_costs(network: type[nn.Module], config: Any, costs: Costs) -> None:
    """Use these costs from now on in this process, as if they had been counted; arguments as in `counted_costs`."""
    _counted[network, repr(config)] = costs


def count_on_small_tables(network: Any, config: Any) -> Costs:
    """Count costs of all SHAPES and fit them."""
    flops = []
    kept = []
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):  # the weights do not matter, and the state of the run must not change
        built = network(config).train()
        for table in random_tables(config, SHAPES, generator):
            flops_of_table, kept_of_table = count(built, Pack.of([table]))
            flops.append(flops_of_table)
            kept.append(kept_of_table)
    return Costs(fit_polynomial(flops), fit_polynomial(kept))


def random_tables(config: Any, shapes: Iterable[Shape], generator: torch.Generator) -> list[tuple[Tensor, Tensor, int]]:
    """Draw tables X (N, M), y (N,), n of these shapes, on the CPU, such as a network with these settings takes."""
    tables = []
    for N, n, M in shapes:
        X = torch.randn(N, M, generator=generator)
        if config.is_regression:
            y = torch.randn(N, generator=generator)
        else:
            y = torch.randint(config.max_classes, (N,), generator=generator)
        tables.append((X, y, n))
    return tables


def count(network: nn.Module, pack: Pack) -> tuple[float, float]:
    """Return the FLOPs of a forward pass, and the values that it saves for the backward pass."""
    parameters = {parameter.data_ptr() for parameter in network.parameters()}
    sizes: dict[int, int] = {}  # of the saved tensors, by their memory, so that none counts twice
    held: list[Tensor] = []  # otherwise the memory of a tensor could be used again

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        address = tensor.data_ptr()
        if address not in parameters:
            sizes[address] = max(sizes.get(address, 0), tensor.numel())
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(pack)
    return float(counter.get_total_flops()), float(sum(sizes.values()))


def fit_polynomial(counts: list[float]) -> tuple[float, ...]:
    """Fit a polynomial by least squares; coefficients have few digits, so that they are the same on every machine."""
    matrix = torch.tensor([terms(*shape) for shape in SHAPES], dtype=torch.float64)
    target = torch.tensor(counts, dtype=torch.float64)
    scale = matrix.norm(dim=0)
    # The terms are nearly dependent on few shapes; gelsd cuts what the counts do not decide.
    solution = torch.linalg.lstsq(matrix / scale, target[:, None], rcond=1e-9, driver="gelsd").solution[:, 0] / scale
    negligible = 1e-9 * solution.abs().max().item()
    coefficients = []
    for coefficient in solution.tolist():
        coefficients.append(0.0 if abs(coefficient) < negligible else float(f"{coefficient:.{DIGITS}g}"))
    return tuple(coefficients)
