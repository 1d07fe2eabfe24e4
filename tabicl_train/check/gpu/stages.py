"""Steps of the three stages of TabICLv2: their time, their memory against the plan, and their losses against fp32."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tabicl_train.check.gpu.launches import Kernel, launched_kernels
from tabicl_train.check.gpu.place import CheckFailed, CheckSkipped, Place, distance, expect
from tabicl_train.check.gpu.small import random_pack
from tabicl_train.check.gpu.steps import compiler_of, module_of
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig, StageConfig, configured_prior
from tabicl_train.model.config import family_of
from tabicl_train.model.family import random_tables
from tabicl_train.model.pack import Pack, Shape
from tabicl_train.model.padding import Size
from tabicl_train.stream.curriculum import Group, plan_step
from tabicl_train.stream.steps import StepItem, StepStream, typical_size_of_stage
from tabicl_train.training import compiling
from tabicl_train.training.cuda_graph import EAGER_CALLS
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.planning import (
    bytes_per_weight,
    count_parameters,
    extreme_tables,
    peak_bytes,
    training_flops,
)
from tabicl_train.training.precision import choose_precision, peak_flops, set_up_gpu
from tabicl_train.training.state import choose_attention

EXPERIMENT = "tabicl_v2"
# The step of a stage is divided among so many ranks, and the share of one is computed: eager steps take 1.0, 2.7 and
# 15 s on an H100.
RANKS = {"stage1": 1, "stage2": 4, "stage3": 32}
ITEMS = 2  # steps of each stage
LAPS = 4  # repetitions of these steps; the first one is not counted
MEMORY = 0.15  # largest difference between measured and planned memory, relative to the plan
# Largest relative difference of the loss and the gradient of the first step between a variant and fp32. On a CPU,
# rounding to bf16 changes the gradient of small networks by 1 to 3 %; a wrong kernel changes it by about 100 %.
LOSS, GRADIENT = 0.01, 0.3
VARIANTS = {
    "eager, bf16": ("trainer.precision=bf16", "trainer.attention=torch"),
    "eager, fp32": ("trainer.precision=fp32", "trainer.attention=torch"),
    "compiled, bf16": ("trainer.precision=bf16", "trainer.compile=true", "trainer.attention=torch"),
    "compiled with Triton, bf16": ("trainer.precision=bf16", "trainer.compile=true", "trainer.attention=auto"),
}
KERNELS, NAME = 12, 100  # kernels of a step that the page lists, and characters of their names
SMALL_STEPS = (("mini", 4), ("mini", 64), ("base", 16), ("base", 64))  # networks, and tables of a step
# Settings for a CPU: a network and tables that take seconds.
SMALL = (
    "model=tiny",
    "prior=mlp_scm",
    *(f"curriculum.stages.stage{number}.rows=[{30 * number},{40 * number}]" for number in (1, 2, 3)),
    *(f"curriculum.stages.stage{number}.features=[2,4]" for number in (1, 2, 3)),
    *(f"curriculum.stages.stage{number}.tables=4" for number in (1, 2, 3)),
)


def config_of(place: Place, *more: str) -> RunConfig:
    """Return the configuration of the experiment on the device, small on a CPU."""
    size = () if place.is_cuda else SMALL
    base = (f"experiment={EXPERIMENT}", "run_dir=unused", f"trainer.accelerator={place.device.type}")
    return compose([*base, *size, *more])


def first_steps(config: RunConfig) -> dict[str, int]:
    """Return the second step of each stage, since the first one also resets the optimizer's state, which takes time."""
    first = {}
    step = 0
    for name, stage in config.curriculum.stages.items():
        first[name] = step + 1
        step += stage.steps
    return first


def ranks_of(place: Place, stage: str) -> int:
    """Return the number of ranks that a step is divided among; the share of one rank is computed."""
    return RANKS.get(stage, 1) if place.is_cuda else 1


class Share(NamedTuple):
    """The share of rank 0 of a step: tables of the planned sizes with random values, which do not change times."""

    item: StepItem
    flops: float  # forward and backward
    whole: float  # FLOPs of the step on all ranks


def planned_share(config: RunConfig, step: int, ranks: int = 1) -> Share:
    """Return the share of rank 0 of a step that is divided among `ranks`, without drawing tables from the prior."""
    plan = plan_step(config.curriculum, config.model, config.seed, step)
    generator = torch.Generator().manual_seed(step)
    packs = []
    flops = 0.0
    for groups in plan.packs(0, ranks):
        shapes = shapes_of(groups)
        pack = Pack.of(random_tables(config.model, shapes, generator))
        pack.layout = family_of(config.model).prepared(config.model, pack)  # workers on a machine with a GPU do this
        packs.append(pack)
        flops += training_flops(config.model, shapes)
    item = StepItem(step, plan.stage, plan.tables, packs)
    return Share(item, flops, training_flops(config.model, shapes_of(plan.groups)))


def shapes_of(groups: Iterable[Group]) -> list[Shape]:
    """Return the shapes of all tables of some groups."""
    shapes = []
    for group in groups:
        spec = group.spec
        shapes += [(spec.num_rows, spec.train_size, spec.num_features)] * len(group.tables)
    return shapes


def draw_stages(place: Place) -> None:
    """Draw tables of the three stages on one core, after a step that compiles the loops of the priors."""
    config = config_of(place)
    prior = configured_prior(config.prior)
    steps = range(config.total_steps)
    stream = StepStream(prior, config.curriculum, config.model, config.seed, steps, 0, 32 if place.is_cuda else 1)
    for stage, first in first_steps(config).items():
        stream.draw(first - 1)
        started = time.process_time()
        item = stream.draw(first)
        seconds = (time.process_time() - started) / sum(len(pack) for pack in item.packs)
        # With 64 tables a step, the time of a table decides how many cores a GPU needs.
        place.add("figures", figure=f"seconds of a core for a table of {stage}", value=seconds)


def step_of_variant(place: Place, variant: str) -> None:
    """Time steps of the three stages in a variant, and compare its first step with eager fp32."""
    # The network of the variant, with TF32 as in training.
    settings = VARIANTS[variant]
    if place.is_cuda and "bf16" in variant and not torch.cuda.is_bf16_supported(False):
        raise CheckSkipped("the GPU has no bf16")
    backend = compiler_of(place) if "trainer.compile=true" in settings else None
    config = config_of(place, *settings)
    set_up_gpu(config.trainer)
    module = variant_of(place, config, backend)
    optimizer = module.configure_optimizers()

    # The stages in order. The first step of the first stage is computed in eager fp32, too.
    exact = None
    unfinished = []
    for stage, first in first_steps(config).items():
        ranks = ranks_of(place, stage)
        shares = [planned_share(config, first + number, ranks) for number in range(ITEMS)]
        if stage == "stage1" and variant != "eager, fp32":
            exact = gradient_of_step(place, shares[0].item)
        started = time.perf_counter()
        laps = time_steps(place, module, optimizer, shares)
        if exact is not None:
            compare_variant(place, variant, exact, laps)
            exact = None
        if not laps.times:
            unfinished.append(stage)
            continue
        add_times(place, f"{stage}, {variant}", ranks, shares, laps, time.perf_counter() - started, config)
        if stage == "stage1":
            add_kernels(place, f"{stage}, {variant}", laps.kernels)

    torch._dynamo.reset()
    if unfinished:
        raise CheckSkipped(f"no time was left for {', '.join(unfinished)}")


class Laps(NamedTuple):
    """What was measured of steps that were taken several times.

    Parameters
    ----------
    times : list of float
        Seconds of each step after the first lap.
    host : list of float
        Seconds until the host had given the device all work of each of these steps.
    flops : list of float
        FLOPs of each of these steps.
    kernels : list of Kernel
        Kernels of one more step.
    loss, gradient : Tensor
        Loss and clipped gradient of the first step, () and (values,).
    halved : bool
        Whether a pack did not fit and was halved.
    """

    times: list[float]
    host: list[float]
    flops: list[float]
    kernels: list[Kernel]
    loss: torch.Tensor
    gradient: torch.Tensor
    halved: bool


def variant_of(place: Place, config: RunConfig, backend: str | None) -> TrainedNetwork:
    """Build the network of a variant; `backend` is that of the compiler, or None for eager blocks."""
    module = module_of(config, place.device)
    if backend is not None:
        compiling.compile_blocks(module.model, backend)
    if place.is_cuda:
        choose_attention(module, config, Ranks())
    return module


def time_steps(place: Place, module: TrainedNetwork, optimizer: torch.optim.Optimizer, shares: list[Share]) -> Laps:
    """Take the steps of a stage in several laps, as long as there is time, and one more step under the profiler."""
    times, host, flops = [], [], []
    loss, gradient = torch.zeros(()), torch.zeros(())
    if place.is_cuda:
        torch.cuda.reset_peak_memory_stats()

    # The host returns from a step before the device has done it, so there are two times.
    for lap in range(LAPS):
        for number, share in enumerate(shares):
            if place.seconds_left() < 0:
                break
            moved = share.item.to(place.device)
            place.wait()
            started = time.perf_counter()
            module.train_on(moved, moved.step, 0, optimizer)
            host_seconds = time.perf_counter() - started
            place.wait()
            seconds = time.perf_counter() - started
            if lap == number == 0:
                loss, gradient = module.loss.clone(), module.gradients.flat.clone()  # type: ignore[union-attr]
            if lap > 0:
                times.append(seconds)
                host.append(host_seconds)
                flops.append(share.flops)

    kernels = []
    if times:
        kernels = launched_kernels(place, lambda: module.train_on(moved, moved.step, 0, optimizer))
    return Laps(times, host, flops, kernels, loss, gradient, module.too_large < math.inf)


def gradient_of_step(place: Place, item: StepItem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the clipped flat gradient of a step in eager fp32."""
    config = config_of(place, "trainer.precision=fp32")
    module = module_of(config, place.device)
    module.train_on(item.to(place.device), item.step, 0, module.configure_optimizers())
    assert module.gradients is not None
    return module.loss.clone(), module.gradients.flat.clone()


def compare_variant(place: Place, variant: str, exact: tuple[torch.Tensor, torch.Tensor], laps: Laps) -> None:
    """Compare the first step of a variant with eager fp32."""
    loss, gradient = distance(laps.loss, exact[0]), distance(laps.gradient, exact[1])
    place.add("figures", figure=f"first step {variant}: error of the loss against eager fp32", value=loss)
    place.add("figures", figure=f"first step {variant}: error of the gradient against eager fp32", value=gradient)
    what = f"the first step differs from eager fp32 by {loss:.1e} (loss; {LOSS} is allowed) and"
    expect(loss <= LOSS and gradient <= GRADIENT, f"{what} {gradient:.1e} (gradient; {GRADIENT} is allowed)")


def add_times(
    place: Place, step: str, ranks: int, shares: list[Share], laps: Laps, seconds: float, config: RunConfig
) -> None:
    """Add a row about the time of steps to the page of the check.

    Parameters
    ----------
    place : Place
        Where the check runs.
    step : str
        The name of the row: a stage or a network, and the variant.
    ranks : int
        The number of ranks that each step is divided among.
    shares : list of Share
        The part of each step that was computed, that of one rank.
    laps : Laps
        The times of these parts, and the kernels of one of them.
    seconds : float
        Seconds of everything, with warm-up and compilation.
    config : RunConfig
        The configuration, of which the precision is used.
    """
    # The speed of the device. With the FLOPs of a step on all ranks it gives the time of a step on a single rank.
    flops_per_second = sum(laps.flops) / sum(laps.times)
    peak = peak_flops(place.device, choose_precision(config.trainer).name, config.trainer.tf32)
    flops_of_step = statistics.mean(share.whole for share in shares)
    # The time of the host, in total and for each launch; there are no launches on a CPU.
    host_seconds = statistics.median(laps.host)
    launches = sum(kernel.launches for kernel in laps.kernels)
    place.add(
        "steps",
        **{
            "step": step,
            "share of the step": "all" if ranks == 1 else f"1/{ranks}",
            "ms, median": 1e3 * statistics.median(laps.times),
            "ms, fastest": 1e3 * min(laps.times),
            "ms of the host": 1e3 * host_seconds,
            "launches": launches or None,
            "us of the host a launch": 1e6 * host_seconds / launches if launches else None,
            "ms of kernels": sum(kernel.ms for kernel in laps.kernels) or None,
            "ms, whole step by FLOPs": 1e3 * flops_of_step / flops_per_second,
            "TFLOP/s": flops_per_second / 1e12,
            "of the peak": None if peak is None else flops_per_second / peak,
            "memory, GB": torch.cuda.max_memory_allocated() / 1e9 if place.is_cuda else None,
            "s with warm-up": seconds,
            "packs": "halved" if laps.halved else "whole",
        },
    )


def add_kernels(place: Place, step: str, kernels: list[Kernel]) -> None:
    """Add a row for each of the kernels that take most of a step."""
    for kernel in sorted(kernels, key=lambda kernel: -kernel.ms)[:KERNELS]:
        place.add("kernels", step=step, ms=kernel.ms, launches=kernel.launches, kernel=kernel.name[:NAME])


def small_steps(place: Place) -> None:
    """Time steps of the small networks, eager and as CUDA graphs, with few and with many tables.

    The time of their eager steps is that of the host.
    """
    for name, tables in SMALL_STEPS if place.is_cuda else SMALL_STEPS[:1]:
        settings = [f"experiment={name}", f"model={name}", "run_dir=unused", f"trainer.accelerator={place.device.type}"]
        settings += [f"curriculum.stages.short.tables={tables}", "curriculum.stages.short.group_size=4"]
        config = compose(settings)
        set_up_gpu(config.trainer)

        # The same tables for both. For graphs their packs are padded, and steps are taken until each size is captured.
        eager = [planned_share(config, step) for step in range(1, 1 + (8 if place.is_cuda else 1))]
        typical = typical_size_of_stage(config.curriculum, config.model, config.seed, 0)
        assert typical is not None  # since the network is a TabICL
        for way in ("eager", "graphs"):
            module = variant_of(place, config, None)
            optimizer = module.configure_optimizers()
            shares = eager
            started = time.perf_counter()
            if way == "graphs":
                shares = [padded_share(config, share, typical) for share in eager]
                module.step_replay.enabled = place.is_cuda
                for share in shares * (1 + EAGER_CALLS):  # the last call of each is captured
                    module.train_on(share.item.to(place.device), share.item.step, 0, optimizer)
            laps = time_steps(place, module, optimizer, shares)
            if not laps.times:
                raise CheckSkipped(f"no time was left for {name} with {tables} tables")
            if place.is_cuda and way == "graphs":
                expect(module.step_replay.enabled, "a step was not captured; see log.txt")
            seconds = time.perf_counter() - started
            what = f"{name}, {tables} tables, {choose_precision(config.trainer).name}, {way}"
            add_times(place, what, 1, shares, laps, seconds, config)


def padded_share(config: RunConfig, share: Share, typical: Size) -> Share:
    """Return a share with its pack padded, or unchanged if none of the sizes fits."""
    (pack,) = share.item.packs
    padded = family_of(config.model).padded(config.model, pack, typical)
    return share._replace(item=replace(share.item, packs=[padded or pack]))


def network_in_stage(config: RunConfig, stage: StageConfig) -> Any:
    """Return the settings of the network with those that a stage changes."""
    changed: dict[str, Any] = {}
    if stage.checkpoint_rows is not None:
        changed["checkpoint_rows"] = stage.checkpoint_rows
    if stage.col_attention_fp32 is not None:
        changed["col_attention_fp32"] = bool(stage.col_attention_fp32)
    return replace(config.model, **changed)  # type: ignore[type-var]  # a dataclass


def largest_pack(
    config: RunConfig, stage: StageConfig, limit: float, least_rows: int
) -> tuple[tuple[Shape, ...], float]:
    """Find the pack that needs the most memory by the plan, within a limit.

    Parameters
    ----------
    config : RunConfig
        The configuration.
    stage : StageConfig
        The stage whose tables are packed.
    limit : float
        Bytes that are available.
    least_rows : int
        The fewest rows of the tables.

    Returns
    -------
    (tuple of Shape, float)
        The tables, and the bytes that the plan expects; no tables if none fits.
    """
    network = network_in_stage(config, stage)
    precision = choose_precision(config.trainer).name
    parameters = count_parameters(network)
    largest: tuple[Shape, ...] = ()
    most = 0.0
    for shape in extreme_tables(network, stage):
        rows, _, features = shape
        if rows < least_rows:
            continue
        count = int(stage.pack_tokens // family_of(network).pack_tokens(network, rows, features))
        # The most tables that fit, from a full pack down to a single table.
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
        for least_rows in (0, stage.rows[1]):  # among all tables, and among the longest ones
            shapes, planned = largest_pack(config, stage, limit, least_rows)
            if not shapes:
                why = f"skipped: no table of {least_rows:,} rows fits into {limit / 1e9:.0f} GB by the plan"
                place.add("memory", pack=f"{name}: tables of {least_rows:,} rows", result=why)
            elif shapes not in done:
                wrong += memory_of_pack(place, config, name, step, shapes, planned)
            done.add(shapes)
    if wrong:
        raise CheckFailed("; ".join(wrong))


def memory_of_pack(
    place: Place, config: RunConfig, stage: str, step: int, shapes: tuple[Shape, ...], planned: float
) -> list[str]:
    """Take a step with these tables, add its row to the page, and return what is wrong."""
    torch.cuda.empty_cache()
    module = module_of(config, place.device)
    optimizer = module.configure_optimizers()

    # A small step first, after which the optimizer has its state.
    small = StepItem(step, stage, 2, [random_pack(((100, 50, 5),) * 2).to(place.device)])
    module.train_on(small, step, 0, optimizer)

    item = StepItem(step, stage, len(shapes), [random_pack(shapes).to(place.device)])
    torch.cuda.reset_peak_memory_stats()
    module.train_on(item, step, 0, optimizer)
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
    return [] if fits else [f"{what}: {measured / 1e9:.1f} GB; the plan expects {planned / 1e9:.1f} GB"]
