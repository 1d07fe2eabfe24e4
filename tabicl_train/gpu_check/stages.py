"""Steps of the three stages of TabICLv2: time, memory beside the plan, and the loss of each variant beside fp32."""

from __future__ import annotations

import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from tabicl_train import compiling
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig, StageConfig, configured_prior
from tabicl_train.curriculum import plan_step
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.gpu_check.place import CheckFailed, CheckSkipped, Place, distance, expect
from tabicl_train.gpu_check.small import random_pack
from tabicl_train.gpu_check.steps import compiler_of, module_of
from tabicl_train.model.config import family_of
from tabicl_train.model.pack import Shape
from tabicl_train.module import Pretraining
from tabicl_train.planning import bytes_per_weight, count_parameters, extreme_tables, peak_bytes
from tabicl_train.precision import choose, peak_flops, set_up_gpu
from tabicl_train.state import choose_attention
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import Content, packed, unpacked

EXPERIMENT = "tabicl_v2"
# The share of a rank of so many is computed, since by estimate a step takes 0.5, 1.6 and 13 s on an H100.
RANKS = {"stage1": 1, "stage2": 4, "stage3": 32}
ITEMS = 2  # steps of each stage
LAPS = 4  # over these steps; the first one is not counted
MEMORY = 0.15  # largest difference between measured and planned memory, relative to the plan
# Largest difference between the loss and gradient of the first step in a variant, and in fp32. On a CPU, rounding of
# bf16 changes the gradient of small networks by 1 to 3 %; a wrong kernel changes it by about its size.
LOSS, GRADIENT = 0.01, 0.3
VARIANTS = {
    "eager, bf16": ("trainer.precision=bf16", "trainer.attention=torch"),
    "eager, fp32": ("trainer.precision=fp32", "trainer.attention=torch"),
    "compiled, bf16": ("trainer.precision=bf16", "trainer.compile=true", "trainer.attention=torch"),
    "compiled with Triton, bf16": ("trainer.precision=bf16", "trainer.compile=true", "trainer.attention=auto"),
}
# Sizes for a CPU: the network and tables of seconds
SMALL = (
    "model=tiny",
    "prior=mlp_scm",
    *(f"curriculum.stages.stage{number}.rows=[{30 * number},{40 * number}]" for number in (1, 2, 3)),
    *(f"curriculum.stages.stage{number}.features=[2,4]" for number in (1, 2, 3)),
    *(f"curriculum.stages.stage{number}.tables=4" for number in (1, 2, 3)),
)


class Drawn(NamedTuple):
    """Steps of a stage, or the shares of a rank in them."""

    items: list[StepItem]
    flops: list[float]  # of each, forward and backward
    whole: float  # mean FLOPs of a step of all ranks


def config_of(place: Place, *more: str) -> RunConfig:
    """Return the experiment on the device; small on a CPU."""
    size = () if place.is_cuda else SMALL
    base = (f"experiment={EXPERIMENT}", "run_dir=unused", f"trainer.accelerator={place.device.type}")
    return compose([*base, *size, *more])


def first_steps(config: RunConfig) -> dict[str, int]:
    """Return the second step of each stage: at the first one the optimizer's state is removed, which takes time."""
    first = {}
    step = 0
    for name, stage in config.curriculum.stages.items():
        first[name] = step + 1
        step += stage.steps
    return first


def ranks_of(place: Place, stage: str) -> int:
    """Return among how many ranks a step is divided, of which one is computed."""
    return RANKS.get(stage, 1) if place.is_cuda else 1


class Share(NamedTuple):
    """What rank 0 computes of a step."""

    content: Content
    flops: float  # forward and backward
    whole: float  # FLOPs of the step on all ranks
    seconds: float  # of a core, to draw a table


def draw_share(settings: list[str], step: int, ranks: int) -> Share:
    """Draw the share of rank 0 in a step that is divided among so many ranks."""
    torch.set_num_threads(1)
    config = compose(settings)
    prior = configured_prior(config.prior)
    stream = StepStream(prior, config.curriculum, config.model, config.seed, range(config.total_steps), 0, ranks)
    plan = plan_step(config.curriculum, config.model, config.seed, step, prior)
    started = time.process_time()
    item = stream.draw(step)
    seconds = time.process_time() - started

    groups = []
    for groups_of_pack in plan.packs(0, ranks):
        groups += groups_of_pack
    tables = sum(len(group.tables) for group in groups)
    # Costs are FLOPs of the forward pass; the backward pass takes twice as many.
    flops = 3 * sum(group.cost for group in groups)
    whole = 3 * sum(group.cost for group in plan.groups)
    return Share(packed(item), flops, whole, seconds / tables)


def tables(place: Place) -> None:
    """Draw the tables of the three stages, on all cores, for the checks that follow."""
    settings = [f"experiment={EXPERIMENT}", "run_dir=unused", "trainer.accelerator=cpu"]
    settings += [] if place.is_cuda else list(SMALL)
    config = config_of(place)
    jobs = []
    for stage, first in first_steps(config).items():
        for number in range(ITEMS):
            jobs.append((stage, (settings, first + number, ranks_of(place, stage))))
    if place.is_cuda:
        cores = len(os.sched_getaffinity(0))
        # Spawned, as this process may have a CUDA context. The long steps of stage 3 first.
        with ProcessPoolExecutor(min(cores, len(jobs)), get_context("spawn")) as pool:
            running = [(stage, pool.submit(draw_share, *job)) for stage, job in reversed(jobs)]
            results = [(stage, future.result()) for stage, future in reversed(running)]
    else:
        results = [(stage, draw_share(*job)) for stage, job in jobs]

    drawn = {}
    for stage in config.curriculum.stages:
        items = []
        flops = []
        whole = []
        seconds = []
        for name, share in results:
            if name == stage:
                items.append(unpacked(*share.content))
                flops.append(share.flops)
                whole.append(share.whole)
                seconds.append(share.seconds)
        # Beside one GPU only the time for each table counts; with 64 tables a step, it decides how many cores it needs.
        place.add("figures", figure=f"seconds of a core for a table of {stage}", value=statistics.mean(seconds))
        drawn[stage] = Drawn(items, flops, statistics.mean(whole))
    torch.save({stage: tuple(content) for stage, content in drawn.items()}, place.folder / "tables.pt")


def read_tables(place: Place) -> dict[str, Drawn]:
    """Return what `tables` has drawn, and draw it first if need be."""
    path = place.folder / "tables.pt"
    if not path.exists():
        tables(place)
    # a file of this command, in a folder of its own
    return {stage: Drawn(*content) for stage, content in torch.load(path, weights_only=False).items()}


def step_of_variant(place: Place, variant: str) -> None:
    """Time steps of the three stages in a variant, and compare its first step with eager fp32."""
    settings = VARIANTS[variant]
    if place.is_cuda and "bf16" in variant and not torch.cuda.is_bf16_supported(False):
        raise CheckSkipped("the GPU has no bf16")
    is_compiled = "trainer.compile=true" in settings
    if is_compiled:
        place.needs_cuda()  # on a CPU, `compiled_step` is enough
    backend = compiler_of(place) if is_compiled else None
    drawn = read_tables(place)
    config = config_of(place, *settings)
    set_up_gpu(config.trainer)  # TF32, as in training
    module = variant_of(place, config, backend)
    optimizer = module.configure_optimizers()
    exact = None if variant == "eager, fp32" else gradient_of_first_step(place, drawn)
    unfinished = []
    for stage, content in drawn.items():
        started = time.perf_counter()
        laps = time_steps(place, module, optimizer, content)
        if exact is not None:
            compare(place, variant, exact, laps)
            exact = None
        if not laps.times:
            unfinished.append(stage)
            continue
        add_times(place, variant, stage, content, laps, time.perf_counter() - started, config)
    torch._dynamo.reset()
    if unfinished:
        raise CheckSkipped(f"no time was left for {', '.join(unfinished)}")


class Laps(NamedTuple):
    """Steps taken several times."""

    times: list[float]  # seconds, of each step after the first lap
    host: list[float]  # until the host had given the device all work
    flops: list[float]
    loss: torch.Tensor  # of the first step
    gradient: torch.Tensor  # of the first step, after clipping
    halved: bool  # whether a pack did not fit


def variant_of(place: Place, config: RunConfig, backend: str | None) -> Pretraining:
    """Build the module of a variant."""
    module = module_of(config, place.device)
    if backend is not None:
        compiling.compile_blocks(module.model, backend)
    if place.is_cuda:
        choose_attention(module, config, Ranks())
    return module


def time_steps(place: Place, module: Pretraining, optimizer: torch.optim.Optimizer, content: Drawn) -> Laps:
    """Take the steps of a stage in several laps, as long as there is time."""
    times, host, flops = [], [], []
    loss, gradient = torch.zeros(()), torch.zeros(())
    if place.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for lap in range(LAPS):
        for number, item in enumerate(content.items):
            if place.seconds_left() < 0:
                break
            moved = item.to(place.device)
            place.wait()
            started = time.perf_counter()
            module.training_step(moved, item.step, 0, optimizer)
            host_seconds = time.perf_counter() - started
            place.wait()
            seconds = time.perf_counter() - started
            if lap == number == 0:
                loss, gradient = module.loss.clone(), module.gradients.flat.clone()  # type: ignore[union-attr]
            if lap > 0:
                times.append(seconds)
                host.append(host_seconds)
                flops.append(content.flops[number])
    return Laps(times, host, flops, loss, gradient, module.too_large < math.inf)


def gradient_of_first_step(place: Place, drawn: dict[str, Drawn]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and clipped gradient of the first step in eager fp32."""
    config = config_of(place, "trainer.precision=fp32")
    module = module_of(config, place.device)
    item = next(iter(drawn.values())).items[0].to(place.device)
    module.training_step(item, item.step, 0, module.configure_optimizers())
    assert module.gradients is not None
    return module.loss.clone(), module.gradients.flat.clone()


def compare(place: Place, variant: str, exact: tuple[torch.Tensor, torch.Tensor], laps: Laps) -> None:
    """Compare the first step of a variant with eager fp32."""
    loss, gradient = distance(laps.loss, exact[0]), distance(laps.gradient, exact[1])
    place.add("figures", figure=f"first step {variant}: error of the loss beside eager fp32", value=loss)
    place.add("figures", figure=f"first step {variant}: error of the gradient beside eager fp32", value=gradient)
    what = f"the first step differs from eager fp32 by {loss:.1e} (loss; {LOSS} is allowed) and"
    expect(loss <= LOSS and gradient <= GRADIENT, f"{what} {gradient:.1e} (gradient; {GRADIENT} is allowed)")


def add_times(
    place: Place, variant: str, stage: str, content: Drawn, laps: Laps, seconds: float, config: RunConfig
) -> None:
    """Add the row of a stage."""
    rate = sum(laps.flops) / sum(laps.times)
    peak = peak_flops(place.device, choose(config.trainer).name, config.trainer.tf32)
    ranks = ranks_of(place, stage)
    place.add(
        "steps",
        **{
            "step": f"{stage}, {variant}",
            "share of the step": "all" if ranks == 1 else f"1/{ranks}",
            "ms, median": 1e3 * statistics.median(laps.times),
            "ms, fastest": 1e3 * min(laps.times),
            "ms of the host": 1e3 * statistics.median(laps.host),
            "ms, whole step by FLOPs": 1e3 * content.whole / rate,
            "TFLOP/s": rate / 1e12,
            "of the peak": None if peak is None else rate / peak,
            "memory, GB": torch.cuda.max_memory_allocated() / 1e9 if place.is_cuda else None,
            "s with warm-up": seconds,
            "packs": "halved" if laps.halved else "whole",
        },
    )


def network_in_stage(config: RunConfig, stage: StageConfig) -> Any:
    """Return the settings of the network as a stage uses them."""
    changed: dict[str, Any] = {}
    if stage.checkpoint_rows is not None:
        changed["checkpoint_rows"] = stage.checkpoint_rows
    if stage.col_attention_fp32 is not None:
        changed["col_attention_fp32"] = bool(stage.col_attention_fp32)
    return replace(config.model, **changed)  # type: ignore[type-var]  # a dataclass


def largest_pack(
    config: RunConfig, stage: StageConfig, limit: float, least_rows: int
) -> tuple[tuple[Shape, ...], float]:
    """Return the tables, of so many rows, for which the plan expects the most memory within a limit, and the bytes."""
    network = network_in_stage(config, stage)
    precision = choose(config.trainer).name
    parameters = count_parameters(network)
    largest: tuple[Shape, ...] = ()
    most = 0.0
    for shape in extreme_tables(network, stage):
        rows, _, features = shape
        if rows < least_rows:
            continue
        count = int(stage.pack_tokens // family_of(network).pack_tokens(network, rows, features))
        # from a full pack to the fewest tables
        for tables in range(min(max(count, 1), stage.tables), 0, -1):
            need = peak_bytes(network, parameters, [shape] * tables, precision, bytes_per_weight(config))
            if need <= limit:
                if need > most:
                    largest, most = (shape,) * tables, need
                break
    return largest, most


def memory(place: Place) -> None:
    """Compare the peak memory of the largest packs of each stage with the plan."""
    place.needs_cuda()
    config = config_of(place)
    limit = 0.9 * torch.cuda.get_device_properties(place.device).total_memory
    set_up_gpu(config.trainer)
    wrong = []
    done = set()
    for name, step in first_steps(config).items():
        stage = config.curriculum.stages[name]
        for least_rows in (0, stage.rows[1]):  # of all tables, and of the longest
            shapes, planned = largest_pack(config, stage, limit, least_rows)
            if not shapes:
                why = f"not done: no table of {least_rows:,} rows fits into {limit / 1e9:.0f} GB by the plan"
                place.add("memory", pack=f"{name}: tables of {least_rows:,} rows", result=why)
            elif shapes not in done:
                wrong += memory_of_pack(place, config, name, step, shapes, planned)
            done.add(shapes)
    if wrong:
        raise CheckFailed("; ".join(wrong))


def memory_of_pack(
    place: Place, config: RunConfig, stage: str, step: int, shapes: tuple[Shape, ...], planned: float
) -> list[str]:
    """Take a step with these tables, add its row, and return what is wrong."""
    torch.cuda.empty_cache()
    module = module_of(config, place.device)
    optimizer = module.configure_optimizers()
    # a small step, after which the optimizer has its state
    small = StepItem(step, stage, 2, [random_pack(((100, 50, 5),) * 2).to(place.device)])
    module.training_step(small, step, 0, optimizer)
    item = StepItem(step, stage, len(shapes), [random_pack(shapes).to(place.device)])
    torch.cuda.reset_peak_memory_stats()
    module.training_step(item, step, 0, optimizer)
    place.wait()
    measured = torch.cuda.max_memory_allocated()
    rows, labeled, features = shapes[0]
    fits = abs(measured / planned - 1) <= MEMORY and module.too_large == math.inf
    place.add(
        "memory",
        **{
            "pack": f"{stage}: {len(shapes)} x ({rows:,} rows, {labeled:,} labeled, {features} features)",
            "plan, GB": planned / 1e9,
            "measured, GB": measured / 1e9,
            "reserved, GB": torch.cuda.max_memory_reserved() / 1e9,
            "measured / plan": measured / planned,
            "result": "within 15 %" if fits else "NOT within 15 %",
        },
    )
    what = f"{stage}, {len(shapes)} tables of {rows:,} rows"
    return [] if fits else [f"{what}: {measured / 1e9:.1f} GB, the plan says {planned / 1e9:.1f} GB"]
