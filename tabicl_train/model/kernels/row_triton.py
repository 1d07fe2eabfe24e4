"""Attention among the tokens of a row by Triton kernels: many short sequences, rotary embedding inside.

In place of, for each run of rows of one length: the rotation of queries and keys (two products, a sum and a copy of the
partners each), three transposed copies, `scaled_dot_product_attention`, and the gradients of all these. Queries, keys
and values are read once (in the backward pass with the output and its gradient), and nothing but the output and one
number per query and head is written.

bf16 and fp16 are multiplied by tensor cores, and accumulated in fp32 like all sums; fp32 is multiplied in full fp32
(input_precision="ieee"), without tensor cores.

R rows, T tokens of a row, C queries of a row in cross-attention, H heads, d head dimension, G heads of a program.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from tabicl_train.model.kernels.row_jit import backward_kernel, forward_kernel

# Most tokens of a row: two parts of padded keys (forward); size and number of parts of padded queries (backward).
BLOCKS = {
    16: ((16, 0), (16, 1)),
    32: ((32, 0), (32, 1)),
    64: ((32, 32), (32, 2)),
    96: ((64, 32), (32, 3)),  # a quarter of the arithmetic of half of the longer rows
    128: ((64, 64), (32, 4)),
}
WARPS = 4


def heads_of_a_program(num_heads: int, head_dim: int, most: int) -> int:
    """G, a power of two that divides the number of heads; fewer of wide heads, which need more registers."""
    return min(num_heads & -num_heads, most, 128 // max(head_dim, 16))


def options(num_heads: int, head_dim: int, block: int, backward: bool) -> dict[str, int]:
    """Constants of a kernel and its number of warps for rows of at most `block` tokens.

    Short rows give a warp two heads: a tenth to a third fewer instructions, while registers still leave 12 warps or
    more to a multiprocessor.
    """
    heads = heads_of_a_program(num_heads, head_dim, 8 if block <= (16 if backward else 64) else 4)
    padded = max(16, triton.next_power_of_2(head_dim))
    first, second = BLOCKS[block][backward]
    parts = {"W": first, "PARTS": second} if backward else {"A": first, "B": second}
    return {"H": num_heads, "G": heads, "D": head_dim, "P": padded, "num_warps": min(WARPS, heads)} | parts


def launches(runs: Tensor) -> Iterator[tuple[int, int, int]]:
    """First row, number of rows and block size of each launch. Raises ValueError for rows of too many tokens."""
    first = row = block = 0
    for rows, tokens in runs.tolist():
        if tokens > max(BLOCKS):
            raise ValueError(f"a row has {tokens} tokens, and the kernel takes at most {max(BLOCKS)}")
        needed = next(size for size in BLOCKS if tokens <= size)
        if needed != block and row > first:
            yield first, row - first, block
            first = row
        block = needed
        row += rows
    if row > first:
        yield first, row - first, block


def forward(
    q: Tensor, kv: Tensor | None, runs: Tensor, starts: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens of each row among themselves, or of its first C tokens to all of them.

    q: the packed projection (tokens, 3, H, d) if kv is None, else the queries of the first C tokens of each row,
        (R * C, 1, H, d); bf16, fp16 or fp32
    kv: (tokens, 2, H, d), keys and values
    runs: (S, 2) int64 on the CPU, numbers of rows and their tokens T, in order; one launch for each block size if rows
        are sorted by T
    starts: (R + 1,) int32 or int64, the first token of each row, and the number of all
    cos, sin: (max T, d) float32, see `Rotary`: the sine of a pair's first element is the negative of the second's

    Returns the output (queries, H, d) in the dtype of q and the logarithm of the sum of weights (queries, H), float32.
    Raises ValueError for rows of more than 128 tokens.
    """
    q, kv, per_row = _inputs(q, kv, starts)
    _, _, heads, dim = q.shape
    out = q.new_empty(q.shape[0], heads, dim)
    lse = q.new_empty(q.shape[0], heads, dtype=torch.float32)
    for first, rows, block in launches(runs):
        constants = options(heads, dim, block, backward=False)
        grid = (rows * (heads // constants["G"]),)
        forward_kernel[grid](
            q, kv, starts, cos, sin, out, lse, first, dim**-0.5, C=per_row, INTERLEAVED=interleaved, **constants
        )
    return out, lse


def backward(
    q: Tensor,
    kv: Tensor | None,
    runs: Tensor,
    starts: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of q and kv (None if kv is), of their shapes and dtypes. out, lse: of `forward`; grad: of out."""
    given, (q, kv, per_row) = kv, _inputs(q, kv, starts)
    _, _, heads, dim = q.shape
    dq = torch.empty_like(q)
    dkv = dq[:, 1:] if given is None else torch.empty_like(kv)
    todo = list(launches(runs))
    if per_row:  # only queries are padded here, and of these every row has the same number
        todo = [(0, starts.numel() - 1, next(size for size in BLOCKS if per_row <= size))] if todo else []
    for first, rows, block in todo:
        constants = options(heads, dim, block, backward=True)
        grid = (rows * (heads // constants["G"]),)
        backward_kernel[grid](
            q, kv, starts, cos, sin, out, lse, grad.contiguous(), dq, dkv, first, dim**-0.5,
            C=per_row, INTERLEAVED=interleaved, **constants,
        )  # fmt: skip
    return dq, None if given is None else dkv


def _inputs(q: Tensor, kv: Tensor | None, starts: Tensor) -> tuple[Tensor, Tensor, int]:
    """Contiguous q, keys and values (a view of q in self-attention), and C (0 in self-attention)."""
    q = q.contiguous()
    if kv is None:
        return q, q[:, 1:], 0
    return q, kv.contiguous(), q.shape[0] // max(1, starts.numel() - 1)
