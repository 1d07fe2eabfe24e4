"""Attention at the sizes of training: compared with a computation in float64, and with itself to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tabicl_train.check.gpu.launches import NOT_CHOSEN, attention_names, launched_kernels
from tabicl_train.check.gpu.place import CheckFailed, Place, distance
from tabicl_train.errors import is_installed
from tabicl_train.model.attention import CUDA_GRID, FLASH_BACKWARD, attend, attend_in_columns, fits_one_launch
from tabicl_train.model.pack import Spans, ends_of, row_programs

HEADS = 8
NARROW, WIDE = 16, 64  # dimension of a head in the column and row stages, and in in-context learning
# Largest error of a sequence, relative to its norm. Rounding to bf16 gives 2e-3 to 4e-3, and a wrong kernel about 1.
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
LONGEST = 512  # queries of a sequence that are compared
REPEATS = 5  # repetitions that the time is averaged over


class Case(NamedTuple):
    """Sequences of queries, each with its sequence of keys.

    Parameters
    ----------
    name : str
        What it is in a step.
    queries, keys : Tensor
        The lengths of the sequences, int64 (sequences,).
    head_dim : int, optional
        Dimension of a head.
    uses : int, optional
        Number of sets of sequences that use all keys, one set after the other.
    tables : int, optional
        If above 0, the sequences of a table share their queries up to a factor, and this is the number of tables.
    is_own : bool, optional
        Whether a kernel of triton_attention.py computes it instead of torch's.
    """

    name: str
    queries: Tensor
    keys: Tensor
    head_dim: int = NARROW
    uses: int = 1
    tables: int = 0
    is_own: bool = False


def lengths(low: int, high: int, count: int) -> Tensor:
    """Draw lengths of sequences, in ascending order."""
    return torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(1)).sort().values


def cases(shrink: int) -> Iterator[Case]:
    """Yield the attentions of a training step; `shrink` divides the number of their sequences, for a CPU."""
    # Within rows: the features and CLS tokens of each row of 34 tables of 1,024 rows, which fill a pack of stage 1; the
    # CLS tokens alone as queries; and the narrowest rows.
    rows = lengths(5, 104, 34_816 // shrink)
    yield Case("rows of 5 to 104 tokens", rows, rows)
    yield Case("CLS tokens of these rows", torch.full_like(rows, 4), rows)
    four = torch.full((60_000 // shrink,), 4)
    yield Case("rows of 4 tokens", four, four)

    # Within columns: 128 inducing points attend to the labeled cells of a column, also with queries that a scaling rule
    # changes by table; then all 1,024 cells, first the labeled ones, attend to the inducing points.
    labeled = lengths(300, 900, max(2, 1_600 // shrink))
    points = torch.full_like(labeled, 128)
    yield Case("column to inducing points", points, labeled)
    yield Case("the same, scaled by table", points, labeled, tables=max(1, 32 // shrink))
    both = torch.cat([labeled, 1_024 - labeled])
    yield Case("column from inducing points", both, torch.full_like(both, 128), uses=2)

    # In-context learning: labeled rows and query rows attend to the labeled rows, in tables of 1,024 rows and in one of
    # 48,000 labeled rows and 12,000 query rows.
    n = lengths(300, 900, max(2, 32 // shrink))
    yield Case("in-context learning", torch.cat([n, 1_024 - n]), torch.cat([n, n]), WIDE, uses=2)
    n = torch.tensor([48_000 // shrink])
    yield Case("one table of 60,000 rows", torch.cat([n, n // 4]), torch.cat([n, n]), WIDE, uses=2)

    # Short and uneven lengths, some of them around 128.
    mixed = torch.tensor([1, 2, 3, 17, 127, 128, 129, 255, 1000])
    yield Case("lengths around 128", mixed, mixed.flip(0))


def own_cases() -> Iterator[Case]:
    """Yield those of `cases` that kernels of this package compute; a run also checks them at its start."""
    names = ("rows of 5", "CLS tokens", "the same, scaled", "column from")
    for case in cases(1):
        if case.name.startswith(names):
            yield case._replace(name=f"{case.name}, own kernel", is_own=True)


def cases_at_the_limit(shrink: int) -> Iterator[Case]:
    """Yield attentions just below and just above the largest size that fits into one launch, see `fits_one_launch`."""
    for length in (4, 1_000):
        most = (FLASH_BACKWARD - 1) // (HEADS * 32 * (length + 128))
        most = min(most, CUDA_GRID)
        below = torch.full((most // shrink,), length)
        above = torch.full(((most + most // 50) // shrink,), length)
        yield Case(f"just below 2^31, rows of {length:,}", below, below)
        yield Case(f"just above 2^31, rows of {length:,}", above, above)


def attention(place: Place) -> None:
    """Compare the attentions of a step with float64."""
    check_all(place, cases(1 if place.is_cuda else 2_000))
    if place.is_cuda and is_installed("triton"):
        check_all(place, own_cases())


def attention_at_the_limit(place: Place) -> None:
    """Compare attentions near 2^31 elements, where the 32-bit indices of a kernel end, with float64."""
    check_all(place, cases_at_the_limit(1 if place.is_cuda else 4_000))


def check_all(place: Place, chosen: Iterator[Case]) -> None:
    """Check each case in bf16 and fp32; raises CheckFailed with those that are wrong."""
    wrong = []
    for case in chosen:
        for dtype in LIMIT:
            if not place.is_cuda or dtype == torch.float32 or torch.cuda.is_bf16_supported(False):
                wrong += check_case(place, case, dtype)
            if place.is_cuda:
                torch.cuda.empty_cache()
    if wrong:
        raise CheckFailed("; ".join(wrong))


def check_case(place: Place, case: Case, dtype: torch.dtype) -> list[str]:
    """Check one case in one precision, add its row to the page, and return what is wrong."""
    # A case that does not fit into the free memory is skipped.
    name = str(dtype).removeprefix("torch.")
    spans = spans_of(case, place.device)
    row = {"attention": case.name, "format": name, "sequences": len(case.queries), "queries": spans.queries}
    needed = bytes_of(case, dtype)
    if place.is_cuda and needed > torch.cuda.mem_get_info()[0]:
        place.add("attention", **row, result=f"skipped: needs {needed / 1e9:.0f} GB")
        return []

    # Values and gradients against float64, and against a second computation.
    q, kv = inputs(case, spans, dtype, place.device)
    first = forward_and_backward(q, kv, spans, case.is_own)
    again = forward_and_backward(q, kv, spans, case.is_own)
    repeats = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    error = largest_error_of_case(case, spans, q, kv, first)
    del first, again

    # The kernels that run, and the time of both passes.
    launched = launched_kernels(place, lambda: forward_and_backward(q, kv, spans, case.is_own))
    kernels = attention_names(kernel.name for kernel in launched)
    place.wait()
    started = time.perf_counter()
    for _ in range(REPEATS if place.is_cuda else 1):
        forward_and_backward(q, kv, spans, case.is_own)
    place.wait()
    ms = 1e3 * (time.perf_counter() - started) / (REPEATS if place.is_cuda else 1)

    is_right = error <= LIMIT[dtype]  # false for nan
    is_chosen = not any(NOT_CHOSEN in kernel for kernel in kernels)
    place.add(
        "attention",
        **row,
        **{
            "one launch": yes_or_no(fits_one_launch(spans, HEADS, case.head_dim)) if place.is_cuda else "no (CPU)",
            "largest error": error,
            "same bits again": yes_or_no(repeats),
            "ms, both passes": ms,
            "kernels": ", ".join(kernels) if place.is_cuda else "none (CPU)",
            "result": "right" if is_right and is_chosen else "WRONG",
        },
    )
    wrong = [] if is_right else [f"{case.name} in {name}: error {error:.1e}, {LIMIT[dtype]:.0e} is allowed"]
    return wrong if is_chosen else [*wrong, f"{case.name} in {name}: runs {', '.join(kernels)}, which is not allowed"]


def yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def spans_of(case: Case, device: torch.device) -> Spans:
    """Lay out the sequences as pack.py does."""
    total_keys = int(case.keys.sum()) // case.uses

    # The table of each sequence, if the sequences of a table share their queries.
    table = None
    if case.tables:
        table = torch.arange(len(case.queries)) * case.tables // len(case.queries)

    # Runs of equal sequences: how many, queries, keys, first key, and table.
    runs = []
    key = 0
    tables = [0] * len(case.queries) if table is None else table.tolist()
    pairs = zip(case.queries.tolist(), case.keys.tolist(), tables, strict=True)
    for (queries, keys, table_of_run), same in groupby(pairs):
        count = len(list(same))
        runs.append([count, queries, keys, key % total_keys, table_of_run])
        key += count * keys
    return Spans(
        torch.tensor(runs),
        int(case.queries.sum()),
        ends_of(case.queries).to(device),
        ends_of(case.keys).to(device),
        int(case.queries.max()),
        int(case.keys.max()),
        case.uses,
        None if table is None else table.to(device),
    )


def bytes_of(case: Case, dtype: torch.dtype) -> float:
    """Return the memory that a case needs, in bytes."""
    queries, keys = int(case.queries.sum()), int(case.keys.sum())
    # Two computations of queries, output, keys and values with the gradients of all, and what the backward pass adds in
    # fp32.
    values = HEADS * case.head_dim * (4 * queries + 4 * keys)
    return 2 * values * dtype.itemsize + 4 * HEADS * case.head_dim * (queries + 128 * len(case.queries))


def inputs(case: Case, spans: Spans, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw queries, (Q, H, d) or for P tables with L shared queries (P, L, H, d), and keys and values, (K, 2, H, d)."""
    generator = torch.Generator(device).manual_seed(0)
    first = (case.tables, spans.most_queries) if case.tables else (spans.queries,)
    keys = int(case.keys.sum()) // case.uses
    q = torch.randn(*first, HEADS, case.head_dim, device=device, generator=generator).to(dtype)
    kv = torch.randn(keys, 2, HEADS, case.head_dim, device=device, generator=generator).to(dtype)
    return q.requires_grad_(), kv.requires_grad_()


def own_attention(q: Tensor, kv: Tensor, spans: Spans) -> Tensor:
    """Compute attention by the kernels of this package: q (Q, H, d) or (P, L, H, d), kv (K, 2, H, d) -> (Q, H, d).

    Rows get no rotation: all angles are 0.
    """
    if spans.table is not None or spans.uses > 1:
        return attend_in_columns(q, kv, spans)
    from tabicl_train.model.triton_attention import attend_within_rows

    assert isinstance(spans.runs, Tensor)
    programs = row_programs(spans.runs[:, [0, 2]], q.device)
    cls = 0 if spans.most_queries == spans.most_keys else spans.most_queries
    cos = torch.ones(spans.most_keys, q.shape[-1], device=q.device)
    return attend_within_rows(q, kv, cos, torch.zeros_like(cos), *programs, cls, False)


def forward_and_backward(q: Tensor, kv: Tensor, spans: Spans, is_own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the gradients of half its square with respect to q and kv."""
    out = own_attention(q, kv, spans) if is_own else attend(q, *kv.unbind(1), spans)
    dq, dkv = torch.autograd.grad(out, (q, kv), out.detach())
    return out.detach(), dq, dkv


def largest_error_of_case(
    case: Case, spans: Spans, q: Tensor, kv: Tensor, found: tuple[Tensor, Tensor, Tensor]
) -> float:
    """Return the largest error against float64 over the first, middle and last sequences of a case.

    Parameters
    ----------
    case : Case
        The case.
    spans : Spans
        Its layout.
    q : Tensor
        Queries, (Q, H, d) or (P, L, H, d).
    kv : Tensor
        Keys and values, (K, 2, H, d).
    found : tuple of Tensor
        Output and gradients, as `forward_and_backward` returned them.

    Returns
    -------
    float
        Norm of a difference over the norm of the exact values; nan if any value is nan.
    """
    count = len(case.queries)
    query_ends, key_ends = spans.query_ends.tolist(), spans.key_ends.tolist()
    out, dq, dkv = found
    chosen = {0, 1, count // 2, count - 2, count - 1}
    errors = []
    for i in sorted(chosen & set(range(count))):
        # For sequences with keys other than their own, the last queries only: all would take 18 GB for each head.
        first_query = max(query_ends[i], query_ends[i + 1] - LONGEST) if case.uses > 1 else query_ends[i]
        rows = slice(first_query, query_ends[i + 1])
        first_key = key_ends[i] % len(kv)
        keys = slice(first_key, first_key + key_ends[i + 1] - key_ends[i])
        own = q[rows] if spans.table is None else q[spans.table[i]]
        exact = exact_attention_with_gradients(own, kv[keys], out[rows])
        errors.append(distance(out[rows], exact[0]))
        # With a single key, the gradient of a query is exactly 0 and its rounding is that of products with the gradient
        # of the output, so errors are relative to at least a tenth of that.
        least = 0.1 * torch.linalg.vector_norm(out[rows].double()).item()
        if spans.table is None:  # otherwise dq is a sum over the sequences of a table
            errors.append(distance(dq[rows], exact[1], least))
        if case.uses == 1:  # otherwise dkv is a sum over the uses
            errors.append(distance(dkv[keys], exact[2], least))
    if spans.table is not None:
        errors.append(distance(dq[0], exact_gradient_of_shared_queries(spans, q, kv, out)))
    # Python's max may lose a nan.
    return torch.tensor(errors, dtype=torch.float64).max().item()


def exact_attention_with_gradients(q: Tensor, kv: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and gradients of one sequence in float64.

    Parameters
    ----------
    q : Tensor
        Queries, (Q, H, d).
    kv : Tensor
        Keys and values, (K, 2, H, d).
    gradient : Tensor
        Gradient of the output, (Q, H, d).

    Returns
    -------
    out : Tensor
        (Q, H, d)
    dq : Tensor
        (Q, H, d)
    dkv : Tensor
        (K, 2, H, d)
    """
    q = q.detach().double().requires_grad_()
    kv = kv.detach().double().requires_grad_()
    outs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ kv[:, 0, head].T * q.shape[-1] ** -0.5
        outs.append(torch.softmax(scores, -1) @ kv[:, 1, head])
    out = torch.stack(outs, 1)
    dq, dkv = torch.autograd.grad(out, (q, kv), gradient.double())
    return out.detach(), dq, dkv


def exact_gradient_of_shared_queries(spans: Spans, q: Tensor, kv: Tensor, out: Tensor) -> Tensor:
    """Return the gradient of the queries of table 0, summed over its sequences in float64."""
    assert spans.table is not None
    total = torch.zeros_like(q[0], dtype=torch.float64)
    ends = spans.key_ends.tolist()
    length = q.shape[1]
    for i in range(int((spans.table == 0).sum())):
        total += exact_attention_with_gradients(q[0], kv[ends[i] : ends[i + 1]], out[i * length : (i + 1) * length])[1]
    return total
