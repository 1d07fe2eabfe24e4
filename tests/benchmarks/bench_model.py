"""Time of a training pass (forward and backward) of our network and of the `tabicl` package's, with the same weights.

    python tests/benchmarks/bench_model.py --shapes 2x256x10
    python tests/benchmarks/bench_model.py --shapes --tables
    python tests/benchmarks/bench_model.py --device cuda --dtype bfloat16 --compile --shapes 4x1024x50 1x60000x50

A shape is tables x rows x features. --tables draws 16 tables of 256 to 768 rows (or of the numbers of rows that follow
it) and 5 to 40 features. Ours computes them as one pack, the peer either padded to the largest or one after the other,
whichever is faster.

First the fast paths are checked against fp32 and against the peer. Then both are timed in turn, so that a busy machine
slows both. Without `tabicl` installed, ours is timed alone.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.public_config import to_public

try:
    from tabicl._model.tabicl import TabICL as Peer
except ImportError:
    Peer = None

Batch = tuple[Tensor, Tensor, Tensor]  # X, labels of the first rows, labels of the query rows
CONFIGS = {
    "v1": TabICLConfig.v1(),
    "v2": TabICLConfig(),
    "small": TabICLConfig(
        embed_dim=32, col_num_blocks=2, col_num_heads=4, col_num_inducing=16, row_num_blocks=2, row_num_heads=4,
        icl_num_blocks=4,
    ),
}  # fmt: skip
ROWS, FEATURES, SPLITS = (256, 384, 512, 768), (5, 12, 24, 40), (0.3, 0.5, 0.7, 0.9)


def tables_of(shape: str) -> list[tuple[int, int, int]]:
    """Return rows, labeled rows (60 %) and features of each table."""
    B, N, M = map(int, shape.split("x"))
    return [(N, int(0.6 * N), M)] * B


def mixed_tables(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each number of rows with each number of features and one of the splits in turn, sorted as in training."""
    shapes = [(N, int(SPLITS[(i + j) % 4] * N), M) for i, N in enumerate(rows) for j, M in enumerate(FEATURES)]
    return sorted(shapes)


def draw(shapes: list[tuple[int, int, int]], device: str) -> Pack:
    """Draw random tables with ten classes."""
    generator = torch.Generator().manual_seed(0)
    return Pack.of(
        (torch.randn(N, M, generator=generator), torch.randint(0, 10, (N,), generator=generator), n)
        for N, n, M in shapes
    ).to(torch.device(device))


def one_by_one(pack: Pack) -> list[Batch]:
    """Return batches for the peer: consecutive tables of equal shape together."""
    batches: list[Batch] = []
    for (_, n, _), tables in groupby(zip(pack.shapes, pack.tables(), strict=True), lambda pair: pair[0]):
        X, y, _ = zip(*(table for _, table in tables), strict=True)
        labels = torch.stack(y)
        batches.append((torch.stack(X), labels[:, :n], labels[:, n:]))
    return batches


def padded(pack: Pack) -> list[Batch]:
    """Return all tables as one batch, padded with zeros to the most labeled rows, query rows and features."""
    n, q, M = (max(sizes) for sizes in zip(*((n, N - n, M) for N, n, M in pack.shapes), strict=True))
    X, y = pack.X.new_zeros(len(pack), n + q, M), pack.y.new_zeros(len(pack), n + q)
    y[:, n:] = -100  # cross_entropy ignores these
    for i, (own, labels, labeled) in enumerate(pack.tables()):
        for at, rows in ((0, slice(0, labeled)), (n, slice(labeled, None))):
            X[i, at : at + len(own[rows]), : own.shape[1]] = own[rows]
            y[i, at : at + len(own[rows])] = labels[rows]
    return [(X, y[:, :n], y[:, n:])]


def train_pass(net: nn.Module, data: Pack | list[Batch], dtype: torch.dtype) -> Tensor:
    """Compute the gradients of the mean loss over all tables; returns the logits of the query rows, (query rows, C)."""
    net.zero_grad(set_to_none=True)
    device = next(net.parameters()).device.type
    if isinstance(data, Pack):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = net(data)
        net.losses(logits, data).mean().backward()
        return logits.detach().float()
    found, tables = [], sum(len(X) for X, _, _ in data)
    for X, y_train, y_query in data:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = net(X, y_train)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y_query.flatten())
        (loss * (len(X) / tables)).backward()
        found.append(logits.detach().float().flatten(0, 1))
    return torch.cat(found)


def gradient(net: nn.Module) -> Tensor:
    named = sorted(
        ((name, p.grad) for name, p in net.named_parameters() if p.grad is not None), key=lambda item: item[0]
    )
    return torch.cat([grad.flatten() for _, grad in named])


def compare(net: nn.Module, data: Pack | list[Batch], dtype: torch.dtype, exact: tuple[Tensor, Tensor]) -> str:
    """Return the relative differences of logits and gradient from the exact ones, as norms."""
    results = train_pass(net, data, dtype), gradient(net)
    logits, slope = ((a - b).norm() / b.norm() for a, b in zip(results, exact, strict=True))
    return f"logits {logits:.1e}, gradient {slope:.1e}"


def timed(net: nn.Module, data: Pack | list[Batch], dtype: torch.dtype) -> float:
    synchronize = torch.cuda.synchronize if next(net.parameters()).is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    train_pass(net, data, dtype)
    synchronize()
    return time.perf_counter() - start


def peak(net: nn.Module, data: Pack | list[Batch], dtype: torch.dtype) -> str:
    """Return the peak memory of a GPU, "" on a CPU; raises torch.OutOfMemoryError."""
    train_pass(net, data, dtype)
    if not next(net.parameters()).is_cuda:
        return ""
    torch.cuda.reset_peak_memory_stats()
    train_pass(net, data, dtype)
    return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


def build(config: TabICLConfig, device: torch.device, recompute: bool) -> tuple[TabICL, nn.Module | None]:
    torch.manual_seed(0)
    ours = TabICL(config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "query_mlp" in name:  # zero at the start, which would hide errors
                parameter.normal_(std=0.2)
    ours = ours.to(device).train()
    if Peer is None:
        return ours, None
    peer = Peer(**{**to_public(config), "recompute": recompute})
    peer.load_state_dict(ours.state_dict())
    return ours, peer.to(device).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, default="v2")
    parser.add_argument("--shapes", nargs="*", default=["2x256x10"])
    parser.add_argument("--tables", type=int, nargs="*", metavar="ROWS", help="also 16 tables of different sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="compile our blocks")
    parser.add_argument("--cudnn-attention", action="store_true", help="let torch choose cuDNN attention")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()

    # Settings of torch.
    dtype = getattr(torch, args.dtype)
    torch.backends.cuda.enable_cudnn_sdp(args.cudnn_attention)
    torch._dynamo.config.recompile_limit = 64  # six kinds of blocks share one forward method
    config = CONFIGS[args.config]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    print(f"{args.config}, {args.dtype}, {name}, torch {torch.__version__}, compiled blocks: {args.compile}")

    # The lists of tables, each in a benchmark of its own.
    lists = {shape: tables_of(shape) for shape in args.shapes}
    if args.tables is not None:
        mixed = mixed_tables(args.tables or ROWS)
        lists[f"{len(mixed)} tables"] = mixed
    for tag, shapes in lists.items():
        bench(config, draw(shapes, args.device), dtype, args.compile, args.repeats, f"{tag:>12}  ")


def bench(config: TabICLConfig, pack: Pack, dtype: torch.dtype, compiled: bool, repeats: int, tag: str) -> None:
    # Both networks, compared in fp32 first.
    ours, peer = build(config, pack.X.device, max(N for N, _, _ in pack.shapes) > config.checkpoint_rows > 0)
    runs = {"ours": (ours, pack)}
    exact = train_pass(ours, pack, torch.float32), gradient(ours)
    if peer is not None:
        batches = one_by_one(pack)
        runs["peer"] = peer, batches
        print(tag + "peer float32 against ours float32:", compare(peer, batches, torch.float32, exact))
        if len(batches) > 1:
            runs["peer padded"] = peer, padded(pack)
    if compiled:
        for block in ours.blocks():
            block.compile(dynamic=True)
    print(tag + f"ours as timed, {dtype}, against ours float32:", compare(ours, pack, dtype, exact))

    # Memory; what does not fit is not timed.
    memory = {}
    for who, (net, data) in runs.items():
        with contextlib.suppress(torch.OutOfMemoryError):
            memory[who] = peak(net, data, dtype)

    # Time, in turn.
    times = {who: [] for who in memory}
    for _ in range(repeats):
        for who, seconds in times.items():
            seconds.append(timed(*runs[who], dtype))
    median = {who: statistics.median(seconds) for who, seconds in times.items()}
    for who, seconds in median.items():
        spread = f"{min(times[who]) * 1e3:.0f}..{max(times[who]) * 1e3:.0f}"
        print(tag + f"{who} {seconds * 1e3:.1f} ms ({spread}), {len(pack) / seconds:.1f} tables/s{memory[who]}")
    peers = [seconds for who, seconds in median.items() if who != "ours"]
    if "ours" in median and peers:
        print(tag + f"ours is {min(peers) / median['ours']:.2f} times as fast")


if __name__ == "__main__":
    main()
