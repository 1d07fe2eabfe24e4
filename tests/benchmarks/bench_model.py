"""Time of a training pass (forward and backward) of the model and of the client's network with the same weights.

    python tests/benchmarks/bench_model.py --shapes 2x256x10
    python tests/benchmarks/bench_model.py --device cuda --dtype bfloat16 --compile --shapes 4x1024x50 1x60000x50

A shape is tables x rows x features. First the fast paths are checked against fp32 and against the client, then both
are timed in turn, so that a busy machine slows both. Without `tabicl` installed, ours is timed alone.
"""

import argparse
import contextlib
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.model import TabICL, TabICLConfig
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


def draw(shape: str, device: str) -> Batch:
    """Random X (B, N, M), labels of the first 60 % of rows, labels of the others."""
    B, N, M = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(B, N, M, generator=generator)
    y = torch.randint(0, 10, (B, N), generator=generator)
    n = int(0.6 * N)
    return X.to(device), y[:, :n].to(device), y[:, n:].to(device)


def train_pass(net: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
    X, y_train, y_query = batch
    with torch.autocast(X.device.type, dtype, enabled=dtype != torch.float32):
        logits = net(X, y_train)
    net.zero_grad(set_to_none=True)
    F.cross_entropy(logits.float().flatten(0, 1), y_query.flatten()).backward()
    return logits.detach().float()


def gradient(net: nn.Module) -> Tensor:
    named = sorted(
        ((name, p.grad) for name, p in net.named_parameters() if p.grad is not None), key=lambda item: item[0]
    )
    return torch.cat([grad.flatten() for _, grad in named])


def compare(net: nn.Module, batch: Batch, dtype: torch.dtype, exact: tuple[Tensor, Tensor]) -> str:
    """Relative differences of logits and gradient, as norms."""
    results = train_pass(net, batch, dtype), gradient(net)
    logits, slope = ((a - b).norm() / b.norm() for a, b in zip(results, exact, strict=True))
    return f"logits {logits:.1e}, gradient {slope:.1e}"


def timed(net: nn.Module, batch: Batch, dtype: torch.dtype) -> float:
    synchronize = torch.cuda.synchronize if batch[0].is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    train_pass(net, batch, dtype)
    synchronize()
    return time.perf_counter() - start


def peak(net: nn.Module, batch: Batch, dtype: torch.dtype) -> str:
    if not batch[0].is_cuda:
        return ""
    torch.cuda.reset_peak_memory_stats()
    train_pass(net, batch, dtype)
    return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


def build(config: TabICLConfig, device: torch.device, recompute: bool) -> tuple[TabICL, nn.Module | None]:
    torch.manual_seed(0)
    ours = TabICL(config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "query_mlp" in name:  # the gate starts at zero, which would hide errors
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
    parser.add_argument("--shapes", nargs="+", default=["2x256x10"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="compile our blocks")
    parser.add_argument("--cudnn-attention", action="store_true", help="let torch choose cuDNN attention")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.backends.cuda.enable_cudnn_sdp(args.cudnn_attention)
    torch._dynamo.config.recompile_limit = 64  # six kinds of block share one forward
    config = CONFIGS[args.config]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    print(f"{args.config}, {args.dtype}, {name}, torch {torch.__version__}, compiled blocks: {args.compile}")

    for shape in args.shapes:
        bench(config, draw(shape, args.device), dtype, args.compile, args.repeats, f"{shape:>12}  ")


def bench(config: TabICLConfig, batch: Batch, dtype: torch.dtype, compiled: bool, repeats: int, tag: str) -> None:
    B, N, _ = batch[0].shape
    ours, peer = build(config, batch[0].device, N > config.checkpoint_rows > 0)
    nets = {"ours": ours} | ({"peer": peer} if peer is not None else {})
    exact = train_pass(ours, batch, torch.float32), gradient(ours)
    if peer is not None:
        print(tag + "peer float32 against ours float32:", compare(peer, batch, torch.float32, exact))
    if compiled:
        for block in ours.blocks():
            block.compile(dynamic=True)
    print(tag + f"ours as timed, {dtype}, against ours float32:", compare(ours, batch, dtype, exact))

    memory = {}
    for who, net in nets.items():
        with contextlib.suppress(torch.OutOfMemoryError):
            memory[who] = peak(net, batch, dtype)
    times = {who: [] for who in memory}
    for _ in range(repeats):
        for who, seconds in times.items():
            seconds.append(timed(nets[who], batch, dtype))
    median = {who: statistics.median(seconds) for who, seconds in times.items()}
    for who, seconds in median.items():
        spread = f"{min(times[who]) * 1e3:.0f}..{max(times[who]) * 1e3:.0f}"
        print(tag + f"{who} {seconds * 1e3:.1f} ms ({spread}), {B / seconds:.1f} tables/s{memory[who]}")
    if len(median) == 2:
        print(tag + f"ours is {median['peer'] / median['ours']:.2f} times as fast")


if __name__ == "__main__":
    main()
