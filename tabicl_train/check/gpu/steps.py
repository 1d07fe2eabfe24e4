"""Small training steps on the device, compared with the same steps on the CPU, in fp32, unhalved, or eager."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from tabicl_train.check.gpu.place import CheckFailed, CheckSkipped, Place, distance, expect
from tabicl_train.check.gpu.small import random_pack, small_network
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig, StreamConfig, configured_prior
from tabicl_train.errors import is_installed
from tabicl_train.model.kernels import kernels_of
from tabicl_train.model.pack import Pack
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import Loader
from tabicl_train.training import compiling
from tabicl_train.training.module import TrainedNetwork, query_losses
from tabicl_train.training.optimizer import take_step
from tabicl_train.training.state import untrained_module

SMOKE = ("experiment=smoke", "run_dir=unused", "prior=dummy")  # the dummy prior compiles nothing
SCALINGS = ("none", "ssmax", "qassmax_elementwise", "ssa_trainable")
EXACT, ROUNDED = 1e-4, 3e-2  # largest relative error of losses and gradients in fp32 and in bf16
UPDATE = 1e-3  # of the update of a weight in fp32; rounding in Newton-Schulz gives 2e-5 on a CPU


def module_of(config: RunConfig, device: torch.device) -> TrainedNetwork:
    """Build the network that a run would train on a device, with the initial weights of its seed."""
    module = untrained_module(config).to(device)
    module.move_state()
    return module


def stream_of(config: RunConfig, steps: int) -> StepStream:
    """Return the first steps of a run."""
    return StepStream(configured_prior(config.prior), config.curriculum, config.model, config.seed, range(steps))


def smoke_steps(device: torch.device, precision: str = "fp32", steps: int = 1) -> TrainedNetwork:
    """Return the network of experiment=smoke after some steps on a device."""
    config = compose([*SMOKE, f"trainer.precision={precision}", f"trainer.accelerator={device.type}"])
    stream = stream_of(config, steps)
    module = module_of(config, device)
    optimizer = module.configure_optimizers()
    for step in range(steps):
        module.train_on(stream.draw(step).to(device), step, 0, optimizer)
    return module


def losses_and_gradient(network: nn.Module, pack: Pack, checkpoint_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the losses of the tables, (B,), and the gradient of their sum, (parameters,)."""
    losses = query_losses(network, pack, checkpoint_rows)
    weights = [p for p in network.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), weights, materialize_grads=True)
    return losses.detach(), torch.cat([g.flatten() for g in gradients])


def errors_against(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the relative errors of losses and of gradients."""
    return distance(found[0].cpu(), exact[0].cpu()), distance(found[1].cpu(), exact[1].cpu())


def step_beside_cpu(place: Place) -> None:
    """Take a step in fp32 on the device and on the CPU, and compare losses, gradients and updates of the weights.

    Optimizers turn the rounding of small gradients into updates of full size, so both get the gradients of the CPU.
    """
    # The same step on both. Errors of small gradients are relative to a thousandth of the norm of all.
    expected = smoke_steps(torch.device("cpu"))
    found = smoke_steps(place.device)
    loss = distance(found.loss.cpu(), expected.loss)
    exact = gradients_of(expected)
    least = 1e-3 * torch.linalg.vector_norm(torch.stack([g.norm() for g in exact.values()])).item()
    gradients = {name: distance(g, exact[name], least) for name, g in gradients_of(found).items()}

    # Updates of both from the gradients of the CPU.
    changes = updates(place.device, exact)
    updated = {name: distance(changes[name], change) for name, change in updates(torch.device("cpu"), exact).items()}

    place.add("figures", figure="step in fp32 against the CPU: error of the loss", value=loss)
    expect(loss <= EXACT, f"the loss differs from that of the CPU by {loss:.1e}; {EXACT:.0e} is allowed")
    for what, errors, limit in (("the gradient", gradients, EXACT), ("the update", updated, UPDATE)):
        worst = max(errors, key=lambda name: errors[name])
        figure = f"step in fp32 against the CPU: largest error of {what} of a weight"
        place.add("figures", figure=figure, value=errors[worst])
        why = f"{what} of {worst} differs from that on the CPU by {errors[worst]:.1e}; {limit:.0e} is allowed"
        expect(all(error <= limit for error in errors.values()), why)


def gradients_of(module: TrainedNetwork) -> dict[str, Tensor]:
    """Return the gradients of the last step, after clipping, on the CPU."""
    return {name: p.grad.cpu().clone() for name, p in module.model.named_parameters() if p.grad is not None}


def updates(device: torch.device, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the changes of the weights, on the CPU, by the first step of an optimizer with these gradients."""
    module = smoke_steps(device, steps=0)
    optimizer = module.configure_optimizers()
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    before = {}
    for name, p in module.model.named_parameters():
        before[name] = p.detach().cpu().clone()
        p.grad = gradients[name].to(device) if name in gradients else None
    take_step(optimizer, torch.ones((), dtype=torch.bool, device=device))
    return {name: p.detach().cpu() - before[name] for name, p in module.model.named_parameters() if name in gradients}


def scaling_rule(place: Place, scaling: str, dtype: torch.dtype, triton: bool) -> None:
    """Compare losses and gradients of a scaling rule with those of fp32 on the CPU."""
    if triton and not place.is_cuda:
        raise CheckSkipped("Triton needs a GPU")
    network = small_network(col_scaling=scaling, icl_scaling=scaling)
    pack = random_pack()
    expected = losses_and_gradient(network, pack)
    network = network.to(place.device)
    if triton:
        kernels = kernels_of(network, dtype)
        if not kernels.scaling:
            raise CheckSkipped("the rule has no Triton kernel")
        kernels.use()
    with torch.autocast(place.device.type, dtype, enabled=dtype != torch.float32):
        found = losses_and_gradient(network, pack.to(place.device))
    limit = EXACT if dtype == torch.float32 else ROUNDED
    loss, gradient = errors_against(found, expected)
    name = f"{scaling}, {str(dtype).removeprefix('torch.')}{', Triton' if triton else ''}"
    place.add("figures", figure=f"gradient with {name}", value=gradient)
    expect(loss <= limit and gradient <= limit, f"{name}: losses differ by {loss:.1e}, gradients by {gradient:.1e}")


def scaling_rules(place: Place) -> None:
    """Compare losses and gradients of all scaling rules, in fp32 and bf16, with those of fp32 on the CPU."""
    wrong = []
    for scaling in SCALINGS:
        for dtype in (torch.float32, torch.bfloat16):
            for triton in (False, True) if is_installed("triton") else (False,):
                try:
                    scaling_rule(place, scaling, dtype, triton)
                except CheckSkipped:
                    continue
                except CheckFailed as error:
                    wrong.append(str(error))
    if place.is_cuda and not is_installed("triton"):
        wrong.append("Triton is not installed")
    expect(not wrong, "; ".join(wrong))


def fp32_columns(place: Place) -> None:
    """Compare bf16 training that keeps column attention in fp32 with fp32 on the CPU."""
    network = small_network(col_attention_fp32=True)
    pack = random_pack()
    expected = losses_and_gradient(network, pack)
    network = network.to(place.device)
    kept = []
    first = next(iter(network.blocks()))  # a block of the column stage
    hook = first.register_forward_hook(lambda block, given, out: kept.append(out.dtype))
    with torch.autocast(place.device.type, torch.bfloat16):
        found = losses_and_gradient(network, pack.to(place.device))
    hook.remove()
    loss, gradient = errors_against(found, expected)
    place.add("figures", figure="gradient with fp32 columns in bf16", value=gradient)
    place.add("figures", figure="format after a column block with fp32 columns", value=str(kept[0])[6:])
    expect(loss <= ROUNDED and gradient <= ROUNDED, f"losses differ by {loss:.1e}, gradients by {gradient:.1e}")
    expect(kept[0] == torch.bfloat16, f"tokens after column attention in fp32 are {kept[0]}, which takes more memory")


def recomputation(place: Place) -> None:
    """Compare losses, gradients and peak memory with and without recomputation of activations."""
    network = small_network().to(place.device)
    shapes = ((400, 300, 20),) * (16 if place.is_cuda else 2)
    pack = random_pack(shapes).to(place.device)
    results, peaks = [], []
    for checkpoint_rows in (0, 100):  # never, and for tables with more than 100 rows
        if place.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        results.append(losses_and_gradient(network, pack, checkpoint_rows))
        peaks.append(torch.cuda.max_memory_allocated() / 1e9 if place.is_cuda else math.nan)
    loss, gradient = errors_against(results[1], results[0])
    place.add("figures", figure="gradient with recomputation", value=gradient)
    expect(loss <= EXACT and gradient <= EXACT, f"losses differ by {loss:.1e}, gradients by {gradient:.1e}")
    if place.is_cuda:
        place.add("figures", figure="memory with recomputation, as a share", value=peaks[1] / peaks[0])
        expect(peaks[1] < peaks[0], f"a step needs {peaks[1]:.2f} GB with recomputation, {peaks[0]:.2f} GB without it")


def compiled_step(place: Place) -> None:
    """Compare a compiled step of a small network with an eager one, without and with Triton kernels.

    Graphs are traced, but no code is generated, which took 120 s on a GPU; the steps of the stages do that.
    """
    pack = random_pack().to(place.device)
    expected = losses_and_gradient(small_network().to(place.device), pack)
    wrong = []
    for triton in (False, True)[: 1 + place.is_cuda]:
        network = small_network().to(place.device)
        compiling.compile_blocks(network, "aot_eager")
        name = "compiled"
        if triton:
            kernels_of(network, torch.float32).use()
            name = "compiled with Triton"
        loss, gradient = errors_against(losses_and_gradient(network, pack), expected)
        place.add("figures", figure=f"gradient of a {name} step against an eager one", value=gradient)
        if not (loss <= EXACT and gradient <= EXACT):
            wrong.append(f"{name}: losses differ by {loss:.1e}, gradients by {gradient:.1e}")
    torch._dynamo.reset()
    expect(not wrong, "; ".join(wrong))


def captured_steps(place: Place) -> None:
    """Take the same steps of padded packs eagerly, and as CUDA graphs from the third step of each size on."""
    place.needs_cuda()
    config = compose([*SMOKE, "trainer.precision=fp32", "trainer.accelerator=cuda"])
    weights = []
    for is_replayed in (False, True):
        module = module_of(config, place.device)
        module.step_replay.enabled = is_replayed
        optimizer = module.configure_optimizers()
        stream = replace(stream_of(config, config.total_steps), pads=True)
        for step, item in enumerate(stream):
            module.train_on(item.to(place.device), step, 0, optimizer)
        weights.append(torch.cat([p.detach().flatten() for p in module.model.parameters()]))
    error = distance(weights[1], weights[0])
    place.add("figures", figure=f"weights after {config.total_steps} steps as CUDA graphs: error", value=error)
    place.add("figures", figure="sizes that were captured", value=len(module.step_replay.captured))
    expect(module.step_replay.enabled and len(module.step_replay.captured) > 0, "no step was captured; see log.txt")
    expect(error <= UPDATE, f"weights differ from those of eager steps by {error:.1e}; {UPDATE:.0e} is allowed")


def compiler_of(place: Place) -> str:
    """Return the backend for compiled blocks; skips the check on a CPU, or if the compiler lacks something."""
    place.needs_cuda()  # on a CPU, `compiled_step` covers it
    trainer = compose([*SMOKE, "trainer.accelerator=cuda", "trainer.compile=true"]).trainer
    if problems := compiling.compiler_problems(trainer):
        raise CheckSkipped(problems[0])
    return "inductor"


def no_wait(place: Place) -> None:
    """Take steps in fp32, bf16 and fp16 during which any wait for the device is an error."""
    place.needs_cuda()
    for precision in ("fp32", "bf16", "fp16"):
        step_without_wait(place, precision)


def step_without_wait(place: Place, precision: str) -> None:
    """Take a step in one precision during which any wait for the device is an error."""
    place.needs_cuda()
    module = smoke_steps(place.device, precision, steps=2)  # kernels are compiled, and memory is allocated
    optimizer = module.configure_optimizers()
    stream = stream_of(compose([*SMOKE]), 4)
    items = [stream.draw(step).to(place.device) for step in (2, 3)]
    module.train_on(items[0], 2, 0, optimizer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.train_on(items[1], 3, 0, optimizer)
    except RuntimeError as error:
        raise CheckFailed(f"a step in {precision} waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def halved_pack(place: Place) -> None:
    """Halve a pack that does not fit below a real limit of the allocator, and compare loss and gradient norm."""
    # A pack without recomputation. Its peak without a limit tells where the limit must be.
    place.needs_cuda()
    config = compose([*SMOKE, "trainer.precision=fp32", "model.checkpoint_rows=0", "trainer.accelerator=cuda"])
    item = StepItem(0, "smoke", 16, [random_pack(((400, 300, 20),) * 16).to(place.device)])
    total = torch.cuda.get_device_properties(place.device).total_memory
    modules = []
    peak = 0
    for is_limited in (False, True):
        module = module_of(config, place.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if is_limited:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + peak) / 2 / total)
        try:
            module.train_on(item, 0, 0, module.configure_optimizers())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        peak = torch.cuda.max_memory_reserved()
        modules.append(module)

    # Only the second one must have been halved, with the same result.
    whole, halved = modules
    expect(whole.too_large == math.inf, "a pack did not fit even without a limit")
    expect(halved.too_large < math.inf, "a pack above the limit was not halved")
    loss = distance(halved.loss, whole.loss)
    norm = distance(halved.grad_norm, whole.grad_norm)
    place.add("figures", figure="gradient norm of a halved pack", value=norm)
    expect(loss <= 1e-5 and norm <= 1e-3, f"a halved pack: the loss differs by {loss:.1e}, the norm by {norm:.1e}")


def pinned_workers(place: Place) -> None:
    """Draw tables in workers, pin them and copy them to the device, and compare them with those of this process."""
    config = compose([*SMOKE, f"trainer.accelerator={place.device.type}"])
    stream = stream_of(config, 6)
    with Loader(stream, StreamConfig(num_workers=2), place.device) as loader:
        for step, item in enumerate(loader):
            expected = stream.draw(step)
            if place.is_cuda:
                expect(all(pack.X.is_pinned() and pack.y.is_pinned() for pack in item.packs), "tables are not pinned")
            moved = item.to(place.device)
            place.wait()
            for found, exact in zip(moved.packs, expected.packs, strict=True):
                is_equal = torch.equal(found.X.cpu(), exact.X) and torch.equal(found.y.cpu(), exact.y)
                expect(is_equal and found.shapes == exact.shapes, f"the tables of step {step} differ on the device")
