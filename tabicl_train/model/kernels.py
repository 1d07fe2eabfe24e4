"""Which attention a run uses, `trainer.attention`: Triton kernels of this package, once they have proved themselves.

At the start of a run on a GPU, each kernel that its network needs computes a few ragged sequences, in both passes, and
is compared with float64. If one is wrong or does not compile, all of them stay off, and PyTorch's attention runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.console import first_line
from tabicl_train.errors import is_installed
from tabicl_train.model.attention import KERNEL_DEVICES, Attention, Block, Rotary, turn, widest_row
from tabicl_train.model.family import Network
from tabicl_train.model.pack import TakeRows, ends_of, row_programs
from tabicl_train.model.scaling import SSA, QASSMax
from tabicl_train.model.stages import InducedAttention, RowInteraction

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of an error relative to the norm; rounding to bf16 costs 4e-3
# Widths of rows, beside CLS tokens, that fill programs of all sizes; some rows share one.
WIDTHS = ((5, 1), (2, 29), (1, 60), (1, 100))
# Labeled and query tokens of three columns of two tables: more and fewer than a tile of 64 or 32 tokens.
LABELED = (70, 1, 33)
QUERIES = (3, 65, 1)


@dataclass(frozen=True)
class Kernels:
    """What attention of a network is computed by.

    Parameters
    ----------
    dtype : torch.dtype
        The format in which they are used; another one has not proved itself.
    attention : list of Attention
        Layers whose attention a kernel can compute.
    scaling : list of QASSMax
        Scaling rules that have one.
    """

    dtype: torch.dtype
    attention: list[Attention]
    scaling: list[QASSMax]

    def use(self, used: bool = True) -> None:
        """Let the layers use their kernels on a GPU, or not."""
        for layer in self.attention:
            layer.own_kernels = self.dtype if used else None
        for rule in self.scaling:
            rule.triton = used

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.attention or self.scaling)


def kernels_of(network: Network, dtype: torch.dtype) -> Kernels:
    """Find the layers with kernels in this format: heads of 8 to 32 values, up to 128 inducing points, no dropout."""
    attention: list[Attention] = []
    if dtype in LIMIT:
        for module in network.modules():
            attention += layers_with_kernels(module)
    # The kernel takes queries of rows; inducing points are queries that all columns share (`QASSMax.scale`).
    of_points: set[nn.Module] = set()
    for module in network.modules():
        if isinstance(module, InducedAttention):
            of_points.update(module.modules())
    scaling = [module for module in network.modules() if type(module) is QASSMax and module not in of_points]
    return Kernels(dtype, attention, scaling)


def layers_with_kernels(module: nn.Module) -> list[Attention]:
    """Return the attention layers of a row stage or of a column block that our kernels can compute.

    A subclass has none: a plug-in's stage or block may attend to other tokens, or lack the attributes of ours.
    """
    blocks: list[nn.Module] = []
    if type(module) is RowInteraction:
        blocks = list(module.tf_row["blocks"].children())
    elif type(module) is InducedAttention and len(module.ind_vectors) <= 128:
        blocks = [module.multihead_attn1, module.multihead_attn2]
    return [block.attn for block in blocks if type(block) is Block and has_kernel(block.attn)]


def has_kernel(layer: nn.Module) -> bool:
    """Whether a kernel exists for the heads of a layer, and what it computes is softmax without dropout."""
    if type(layer) is not Attention or isinstance(layer.ssmax_layer, SSA) or layer.dropout > 0:
        return False
    head_dim = layer.dim // layer.num_heads
    return 8 <= head_dim <= 32 and head_dim % 2 == 0


def problem_of_kernels(network: Network, setting: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Find out whether the kernels of a network prove themselves.

    Parameters
    ----------
    network : Network
        The network of a run, on the device.
    setting : str
        `trainer.attention`.
    device : torch.device
        Where the run computes.
    dtype : torch.dtype
        The format of its matrix products.

    Returns
    -------
    str or None
        Why they stay off; None if `Kernels.use` may switch them on.
    """
    kernels = kernels_of(network, dtype)
    if setting == "torch":
        return "trainer.attention is torch"
    if not kernels:
        return "the network has no layer with a kernel"
    if device.type not in KERNEL_DEVICES:
        return f"kernels do not run on device {device.type}"
    if not is_installed("triton"):
        return "Triton is not installed"
    for name, proof in proofs(network, kernels, device, dtype):
        try:
            error = proof()
        except Exception as problem:
            # Triton, its compiler and the driver raise errors of many types.
            return f"the kernel of {name} failed: {type(problem).__name__}: {first_line(problem)}"
        limit = LIMIT.get(dtype, 2e-2)
        # Also if it is NaN.
        if not error <= limit:
            return f"the kernel of {name} is wrong: its error is {error:.1e}, {limit:.0e} is allowed"
    return None


def proofs(
    network: Network, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield what each distinct kernel computes, and a function that returns its largest error."""
    # Rows: one proof for a row stage. Columns: one for each combination of sizes, which all blocks may share.
    columns: set[tuple[int, int, int]] = set()
    for module in network.modules():
        layers = [layer for layer in layers_with_kernels(module) if layer in kernels.attention]
        if type(module) is RowInteraction and layers:
            heads = module.config.row_num_heads
            yield "rows", partial(row_error, module, heads, module.config.embed_dim // heads, device, dtype)
        elif type(module) is InducedAttention:
            points = len(module.ind_vectors)
            columns.update((layer.num_heads, layer.dim // layer.num_heads, points) for layer in layers)
    for heads, dim, points in sorted(columns):
        yield "columns", partial(column_error, heads, dim, points, device, dtype)

    # Rules: one for each combination of sizes; the weights do not matter.
    rules = {}
    for rule in kernels.scaling:
        weights = list(rule.query_mlp.parameters())
        rules[rule.num_heads, weights[0].shape[1], len(weights[-1])] = rule
    for rule in rules.values():
        yield "scaling", partial(scaling_error, rule, device, dtype)


def exact_attention(q: Tensor, kv: Tensor) -> Tensor:
    """Compute attention of one sequence: q (Q, H, d), kv (K, 2, H, d), float64 -> (Q, H, d)."""
    k, v = kv.transpose(0, 2).unbind(1)  # (H, K, d)
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v).transpose(0, 1)


def largest_error(own: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Compare outputs, and gradients for a fixed gradient of the output, with those of float64 for the same inputs."""
    results = []
    for function, leaves in ((own, inputs), (exact, [x.double() for x in inputs])):
        leaves = [x.detach().requires_grad_() for x in leaves]
        with torch.enable_grad():
            out = function(*leaves)
            grad = torch.linspace(-1, 1, out.numel(), device=out.device).sin().mul(7).cos().view(out.shape)
            # Both get the same gradient, rounded to the format of the inputs.
            grad = grad.to(inputs[0].dtype).to(out.dtype)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    errors = [(found.double() - value).norm() / value.norm() for found, value in zip(*results, strict=True)]
    return torch.stack(errors).max().item()


def randn(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw normal values, the same on all devices."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def row_error(module: RowInteraction, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of attention within rows, of all tokens and of CLS tokens alone."""
    from tabicl_train.model.triton_attention import attend_within_rows

    # Rows of the widths of all programs, as far as kernels can compute them, and their layout.
    cls = module.config.row_num_cls
    interleaved = module.config.row_rope_interleaved
    runs = [(count, width + cls) for count, width in WIDTHS if width + cls <= widest_row(dim)]
    widths = [width for count, width in runs for _ in range(count)]
    cos, sin = Rotary(dim, module.config.row_rope_base, interleaved).to(device)(max(widths))
    programs = row_programs(torch.tensor([[count, T, T, 0, 0] for count, T in runs]), device)
    starts = torch.tensor(widths).cumsum(0) - torch.tensor(widths)
    collecting = (starts[:, None] + torch.arange(cls)).flatten().to(device)  # (rows * cls,)
    qkv = randn(sum(widths), 3, heads, dim, device=device, dtype=dtype)

    # All tokens, as in inner blocks, then CLS tokens alone, as in the last one.
    def own(qkv: Tensor) -> Tensor:
        every = attend_within_rows(qkv, None, cos, sin, *programs, 0, interleaved)
        return torch.cat(
            [every, attend_within_rows(qkv[collecting, 0], qkv[:, 1:], cos, sin, *programs, cls, interleaved)]
        )  # fmt: skip

    # The same row by row, in float64.
    def exact(qkv: Tensor) -> Tensor:
        outs = []
        for row in qkv.split(widths):
            T = len(row)
            turned = turn(row[:, :2], cos[:T, None, None].double(), sin[:T, None, None].double(), interleaved)
            outs.append(exact_attention(turned[:, 0], torch.stack([turned[:, 1], row[:, 2]], 1)))
        every = torch.cat(outs)
        return torch.cat([every, every[collecting]])

    return largest_error(own, exact, [qkv])


def column_error(heads: int, dim: int, points: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of attention between tokens of columns and inducing points, in both directions."""
    from tabicl_train.model.triton_attention import points_read_tokens, tokens_read_points

    # The layout of the columns, as in a `FlatLayout`.
    labeled = list(LABELED)
    sequences = [*LABELED, *QUERIES]
    table = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    label_ends = ends_of(torch.tensor(labeled)).to(device)
    ends = ends_of(torch.tensor(sequences)).to(device)
    columns = len(labeled)

    # Inputs of both directions.
    q_of_points = randn(2, points, heads, dim, device=device, dtype=dtype)
    kv_of_tokens = randn(sum(labeled), 2, heads, dim, device=device, dtype=dtype, seed=1)
    q_of_tokens = randn(sum(sequences), heads, dim, device=device, dtype=dtype, seed=2)
    kv_of_points = randn(columns * points, 2, heads, dim, device=device, dtype=dtype, seed=3)

    # The same sequence by sequence, in float64. Labeled and query tokens of a column read the same points.
    def exact_points(q: Tensor, kv: Tensor) -> Tensor:
        pairs = zip(table.tolist(), kv.split(labeled), strict=True)
        return torch.cat([exact_attention(q[own], keys) for own, keys in pairs])

    def exact_tokens(q: Tensor, kv: Tensor) -> Tensor:
        keys = kv.split(points)
        return torch.cat([exact_attention(x, keys[i % columns]) for i, x in enumerate(q.split(sequences))])

    return max(
        largest_error(
            lambda q, kv: points_read_tokens(q, table, kv, label_ends)[0], exact_points, [q_of_points, kv_of_tokens]
        ),
        largest_error(
            lambda q, kv: tokens_read_points(q, kv, ends, points, 2), exact_tokens, [q_of_tokens, kv_of_points]
        ),
    )


def scaling_error(rule: QASSMax, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of a rule's kernel, with weights that are random, since those of a gate start at 0."""
    from tabicl_train.model.triton_scaling import scale_queries

    # Queries of two tables, a base for each of them, and weights. A gate has one value, or as many as a head.
    shapes = [p.shape for p in rule.query_mlp.parameters()]
    heads = rule.num_heads
    dim = shapes[0][1]
    table = torch.tensor([0] * 40 + [1] * 30, device=device)
    q = randn(70, heads, dim, device=device, dtype=dtype)
    parameters = [(2, heads, shapes[-1][0] if shapes[-1][0] > 1 else 1), *shapes]
    others = [
        0.3 * randn(*shape, device=device, dtype=torch.float32, seed=number)
        for number, shape in enumerate(parameters, 1)
    ]

    def exact(q: Tensor, base: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        gate = 1 + torch.tanh(F.linear(F.gelu(F.linear(q, w1, b1)), w2, b2))
        return q * TakeRows.apply(base, table) * gate

    def own(q: Tensor, base: Tensor, *weights: Tensor) -> Tensor:
        return scale_queries(q, base, table.int(), *weights)[0]

    return largest_error(own, exact, [q, *others])
