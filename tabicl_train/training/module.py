"""The network during training: one item of the stream is one optimizer step.

Nothing here waits for the device: the device itself decides whether a step is skipped, and callbacks read the result at
logged steps. An optimizer that cannot leave this to the device, such as one of torch's, waits once in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from priors.random import rng_at
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.console import info, print_line
from tabicl_train.model.casts import CastWeights, aligned_size, aligned_views
from tabicl_train.model.config import family_of
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.model.pack import Pack
from tabicl_train.stream.curriculum import stage_at
from tabicl_train.stream.schedules import learning_rate
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.cuda_graph import Replay
from tabicl_train.training.objectives import Objective, refuse_detached
from tabicl_train.training.objectives import losses_of as query_losses
from tabicl_train.training.optimizer import build_optimizer, is_function_of_tensors, take_step
from tabicl_train.training.precision import DTYPES, LossScale, Precision

__all__ = ["TrainedNetwork"]

# Steps in which packs of a size that did not fit into memory are halved. Then the size is tried again, since what took
# the memory, such as another process, may be gone; a failed try costs one pass.
RETRY = 1000


class Gradients:
    """The gradients of a step and its loss in one flat tensor, so that ranks exchange them in one collective.

    Parameters
    ----------
    trained, frozen : list of Parameter
        The `grad` of a trained parameter becomes a view of the tensor, that of a frozen one None.
    without_effect : iterable of (Parameter, slice)
        Parts of parameters whose gradient is zero up to rounding, see `Network.biases_without_effect`.
    casts : CastWeights, optional
        16-bit copies of weights, with gradients of their own.

    Attributes
    ----------
    flat : Tensor
        (numbers + 1,) float32, all gradients and the loss.
    loss : Tensor
        (1,), the loss, a view of the last number of `flat`.
    views : list of Tensor
        The gradient of each trained parameter, a view of `flat`.
    inputs : list of Tensor
        What autograd differentiates with respect to: the 16-bit copies that are trained, and all trained parameters,
        which an objective may read even if the network reads their copies.
    """

    def __init__(
        self,
        trained: list[nn.Parameter],
        frozen: list[nn.Parameter],
        without_effect: Iterable[tuple[nn.Parameter, slice]] = (),
        casts: CastWeights | None = None,
    ) -> None:
        self.parameters = trained
        self.flat = trained[0].new_zeros(aligned_size(trained) + 1)
        self.views = aligned_views(trained, self.flat)
        self.loss = self.flat[-1:]
        for p, view in zip(trained, self.views, strict=True):
            p.grad = view
        for p in frozen:
            p.grad = None
        self.rounding = [p.grad[part] for p, part in without_effect if p.grad is not None]

        self.casts = casts
        self.inputs: list[Tensor] = []
        self.views_of_casts: list[Tensor] = []
        if casts is not None:
            numbers = {id(p): i for i, p in enumerate(trained)}
            # As large as `flat`, with each gradient at the same position, so that a single sum adds all of them. A
            # parameter without a copy has zeros there.
            self.flat_of_casts = torch.zeros_like(self.flat, dtype=casts.dtype)
            views = aligned_views(trained, self.flat_of_casts)
            for parameter, leaf in zip(casts.parameters, casts.leaves, strict=True):
                if leaf.requires_grad:
                    self.inputs.append(leaf)
                    self.views_of_casts.append(views[numbers[id(parameter)]])
        self.inputs += trained

    def start(self) -> None:
        """Begin a step: set the gradients to zero, and copy the current weights to 16 bits."""
        self.flat.zero_()
        if self.casts is not None:
            self.casts.refresh()

    def add(self, gradients: tuple[Tensor | None, ...], loss: Tensor) -> None:
        """Add the gradients of a pack and its loss.

        Parameters
        ----------
        gradients : tuple of Tensor or None
            One for each tensor of `inputs`; None for a tensor that was not read.
        loss : Tensor
            ().
        """
        # The gradients of the 16-bit copies: cast them to float32 in one buffer, and add it.
        number = len(self.views_of_casts)
        if number:
            cast_gradients = gradients[:number]
            # A copy that was not read would add its gradient of an earlier pack again.
            if any(g is None for g in cast_gradients):
                self.flat_of_casts.zero_()
            read = [(view, g) for view, g in zip(self.views_of_casts, cast_gradients, strict=True) if g is not None]
            torch._foreach_copy_([view for view, _ in read], [g for _, g in read])
            self.flat.add_(self.flat_of_casts)

        # The gradients of the parameters themselves. They are made contiguous, since a single one with other strides
        # than its view, such as that of a slice, would make torch launch a kernel for each.
        read = [(view, g) for view, g in zip(self.views, gradients[number:], strict=True) if g is not None]
        torch._foreach_add_([view for view, _ in read], [g.contiguous() for _, g in read])
        self.loss.add_(loss)

    def exchange(self) -> None:
        """Sum gradients and loss over all ranks; the sums are bit-identical on all of them."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.flat)

    def remove_rounding(self) -> None:
        """Set gradients to zero that are zero in exact arithmetic, see `Network.biases_without_effect`."""
        # Rounding leaves 1e-9 in fp32 and 1e-6 in bf16. AdamW would scale it to full steps in random directions.
        if self.rounding:
            torch._foreach_zero_(self.rounding)


class TrainedNetwork(nn.Module):
    """A network and what an optimizer step needs; the loop in `loop.py` passes step, rank and optimizer.

    Parameters
    ----------
    model : NetworkConfig
        The settings of the network. Its random weights are drawn from torch's global generator.
    curriculum : CurriculumConfig
        The stages, with their learning rates, weight decay, clipping and frozen parts.
    optimizer : object
        The settings of the optimizer, such as an OptimizerConfig.
    precision : Precision
        The number format of matrix products.
    seed : int
        The seed of the run. It determines the random numbers of training, such as those of dropout.
    objective : Objective, optional
        What is minimized, see objectives.py. Default: the network's own loss.
    auxiliary : dict, optional
        Weights of the auxiliary losses that the network returns in addition to its predictions, by name.

    Attributes
    ----------
    loss : Tensor
        (), the mean loss of the last step over the tables of all ranks, on the device and equal on all ranks.
    grad_norm : Tensor
        (), the gradient norm of the last step before clipping, on the device and equal on all ranks.
    finite : Tensor
        (), whether both are finite; if not, all ranks have skipped the step.
    skipped : Tensor
        (), the number of steps skipped in the whole run.
    inherited_range : dict or None
        The trained range of the weights that the run started from, as files hold it; checkpoints keep it.
    """

    def __init__(
        self,
        model: NetworkConfig,
        curriculum: CurriculumConfig,
        optimizer: Any,
        precision: Precision,
        seed: int,
        objective: Any = None,
        auxiliary: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        # The settings.
        self.objective = objective
        self.auxiliary = auxiliary or {}
        self.curriculum = curriculum
        self.optimizer_config = optimizer
        self.precision = precision
        self.seed = seed

        # The network, and the results of the last step.
        self.model: Network = family_of(model)(model)
        self.loss = torch.zeros(())
        self.grad_norm = torch.zeros(())
        self.finite = torch.ones((), dtype=torch.bool)
        self.skipped = torch.zeros((), dtype=torch.int64)
        self.inherited_range: dict[str, Any] | None = None

        # How a step is computed.
        self.uses_kernels = False  # whether attention is computed by the kernels of this package, see model/kernels.py
        self.loss_scale = LossScale(self.precision.name == "fp16")
        self.too_large = math.inf  # tokens of the smallest pack that did not fit into memory recently
        self.too_large_until = 0  # step from which such packs are tried again
        self.gradients: Gradients | None = None
        self.compiled = False  # whether the blocks of the network are compiled

        # CUDA graphs, see cuda_graph.py.
        self.replay = Replay("the optimizer's step")
        self.step_replay = Replay("a whole step")  # enabled if packs are padded
        self.eager_reasons: set[str] = set()  # the reasons printed so far why steps were not replayed
        self.kept_packs: dict[Hashable, Pack] = {}  # by size, the packs whose memory the graphs of whole steps read
        self.states_replaced = 0  # how often the optimizer got another state
        self.rank = 0  # of this process in the last step
        self.made_for: Any = None  # what `gradients` depends on

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer, without state."""
        return build_optimizer(self.model, self.optimizer_config)

    def empty_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the state of a new one; some fill it before their first step, such as torch's Adagrad."""
        self.states_replaced += 1
        optimizer.load_state_dict(self.configure_optimizers().state_dict())

    def move_state(self) -> None:
        """Move what is not a parameter to the device of the parameters, and replay optimizer steps if that is a GPU."""
        # The name is not that of a hook of Lightning, which would call it again and undo `trainer.cuda_graphs`.
        self.skipped = self.skipped.to(self.device)
        self.loss_scale.to(self.device)
        self.replay.enabled = self.device.type == "cuda"

    def train_on(self, item: StepItem, step: int, rank: int, optimizer: torch.optim.Optimizer) -> None:
        """Take one optimizer step: forward and backward passes, exchange, clipping and update, without a device sync.

        Parameters
        ----------
        item : StepItem
            This rank's share of the step, on the device.
        step : int
            The step's number, counted from 0.
        rank : int
            The rank of this process.
        optimizer : torch.optim.Optimizer
            The optimizer, from `configure_optimizers`.

        Raises
        ------
        torch.OutOfMemoryError
            If a single table does not fit into memory; packs that do not fit are halved.
        """
        if item.step != step:
            raise RuntimeError(f"the stream is at step {item.step}, the training loop at {step}")
        self.rank = rank

        # The settings of the stage, which may have begun with this step.
        _, stage, stage_step = stage_at(self.curriculum, step)
        if stage_step == 0 and stage.fresh_optimizer:
            self.empty_state(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, stage_step)
            group["weight_decay"] = stage.weight_decay if group["decayed"] else 0.0

        # The step itself, as a CUDA graph where that is possible; a reason against it is printed once.
        self.set_column_precision(stage)
        gradients = self.gradients_of(stage)
        results = None
        if self.step_replay.enabled:
            reason = self.eager_reason(item, stage, optimizer)
            if reason is None:
                results = self.replayed_step(item, gradients, stage, optimizer)
            elif reason not in self.eager_reasons:
                self.eager_reasons.add(reason)
                print_line(f"graphs    step {step} and others like it run without a CUDA graph: {reason}")
        if results is None:
            results = self.eager_step(item, gradients, stage, optimizer)
        self.loss, self.grad_norm, self.finite = results

    def eager_step(
        self, item: StepItem, gradients: Gradients, stage: StageConfig, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step pack by pack; returns loss, gradient norm, and whether it was taken, each ()."""
        # The gradients, summed over packs and ranks.
        gradients.start()
        # One context for all packs, since autocast keeps its casts of the weights until the context ends.
        with self.precision.autocast(self.device.type):
            for k in range(len(item.packs)):
                self.accumulate(gradients, item, k, stage.checkpoint_rows)
        gradients.exchange()
        gradients.remove_rounding()

        # The update. All ranks have the same seed, since their weights would differ otherwise.
        self.seed_torch(item.step, "optimizer")
        if not self.replay.enabled or not is_function_of_tensors(optimizer):
            return self.update(gradients, stage.clip, partial(take_step, optimizer))
        optimizer.set_rates()
        made_for = (gradients, stage.clip, optimizer, self.states_replaced)
        loss, norm, finite = self.replay(lambda: self.update(gradients, stage.clip, optimizer.update), made_for)
        return loss, norm, finite

    def eager_reason(self, item: StepItem, stage: StageConfig, optimizer: torch.optim.Optimizer) -> str | None:
        """Return why the CUDA graph of other steps of its size cannot replay a step; None if it can."""
        pack = item.packs[0]
        limit = self.model.config.checkpoint_rows if stage.checkpoint_rows is None else stage.checkpoint_rows
        # Graphs are captured for steps of one padded pack.
        if len(item.packs) > 1:
            return "it has several packs"
        if not pack.is_padded:
            return "its tables exceed the sizes that packs are padded to"
        if self.tokens_of(pack) >= self.too_large:
            return "packs of its size are halved"
        if 0 < limit < max(N for N, _, _ in pack.shapes):
            return "activations are recomputed"
        # Hooks run Python code, which a replay would leave out.
        modules = self.model.modules()
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules):
            return "the network has hooks"
        if not is_function_of_tensors(optimizer):
            return "the optimizer has hooks"
        return None

    def replayed_step(
        self, item: StepItem, gradients: Gradients, stage: StageConfig, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Take a step of one padded pack, which a CUDA graph replays from the third step of its size on.

        The graph reads its tables from the first pack of that size; those of later steps are copied into it.

        Returns
        -------
        tuple of Tensor or None
            Loss, gradient norm, and whether the step was taken, each (). None if the pack does not fit into memory.
        """
        (pack,) = item.packs
        assert pack.layout is not None and is_function_of_tensors(optimizer)  # see `eager_reason`
        measures_gates = any(layer.gate_sums is not None for _, layer in self.model.named_scalings())
        size = (pack.layout.key, measures_gates)
        made_for = (gradients, item.stage, optimizer, self.states_replaced)
        # The graphs of an earlier stage are no longer replayed, so nothing reads these packs.
        if made_for != self.step_replay.made_for:
            self.kept_packs.clear()
        # Copy the tables to where the graph reads them.
        kept = self.kept_packs.setdefault(size, pack)
        if kept is not pack:
            kept.copy_(pack)

        def whole_step() -> tuple[Tensor, Tensor, Tensor]:
            gradients.start()
            with self.precision.autocast(self.device.type):
                self.add_gradients(gradients, kept, 1.0, stage.checkpoint_rows)
            gradients.remove_rounding()
            return self.update(gradients, stage.clip, optimizer.update)

        # Seeds and rates are set outside of the graph, since they differ from step to step.
        self.seed_torch(item.step, "optimizer")
        optimizer.set_rates()
        try:
            loss, norm, finite = self.step_replay(whole_step, made_for, size)
        except torch.OutOfMemoryError:  # halves may fit
            return None
        return loss, norm, finite

    def update(
        self, gradients: Gradients, clip: float, take: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Clip the gradients by their norm and take the optimizer's step, unless loss or norm is not finite.

        The gradient g becomes ``g * min(1, clip / (|g| + 1e-6))``, as in torch.nn.utils.clip_grad_norm_ (Pascanu et
        al., arXiv 1211.5063). If `take` is a function of tensors that stay at their addresses, so is this.

        Parameters
        ----------
        gradients : Gradients
            The gradients of all ranks; they are changed.
        clip : float
            The largest norm.
        take : callable
            Takes the optimizer's step; its argument says whether the step counts.

        Returns
        -------
        tuple of Tensor
            Loss, gradient norm before clipping, and whether the step was taken, each ().
        """
        # The gradients of the loss, without its scale.
        views = gradients.views
        torch._foreach_div_(views, self.loss_scale.scale)
        loss = gradients.loss[0].clone()
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(views)))
        finite = loss.isfinite() & norm.isfinite()
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        # In a skipped step, all become NaN and then 0.
        gradients.flat.mul_(torch.where(finite, factor, torch.nan)).nan_to_num_(0.0, 0.0, 0.0)
        take(finite)
        self.skipped += ~finite
        self.loss_scale.update(finite)
        return loss, norm, finite

    def set_column_precision(self, stage: StageConfig) -> None:
        """Tell a network with column attention whether the stage computes it in fp32."""
        set_fp32: Any = getattr(self.model, "set_col_attention_fp32", None)
        if set_fp32 is not None:
            set_fp32(stage.col_attention_fp32)

    def gradients_of(self, stage: StageConfig) -> Gradients:
        """Return the gradients of the parts that a stage trains; consecutive stages that train the same share them."""
        trained_parts = [part for part in self.model.parts if part not in stage.frozen]
        # The weights that are read in 16 bits, which depend on whether the stage computes column attention in fp32.
        places = [] if self.precision.name == "fp32" else list(self.model.products())
        made_for = (trained_parts, places)
        if self.gradients is not None and made_for == self.made_for:
            return self.gradients

        # Divide the parameters. Those outside of the parts that a network names are always trained.
        trained: list[nn.Parameter] = []
        frozen: list[nn.Parameter] = []
        for part, name in self.model.parts.items():
            parameters = [p for p in getattr(self.model, name).parameters() if p.requires_grad]
            if part in trained_parts:
                trained += parameters
            else:
                frozen += parameters
        in_parts = {id(p) for p in trained + frozen}
        trained += [p for p in self.model.parameters() if p.requires_grad and id(p) not in in_parts]

        # An objective of a plug-in may depend on the weights themselves; then every bias may have an effect.
        is_own = self.objective is None or type(self.objective).__module__ == Objective.__module__
        casts = CastWeights(places, DTYPES[self.precision.name], trained) if places else None
        self.gradients = Gradients(trained, frozen, self.model.biases_without_effect() if is_own else (), casts)
        self.made_for = made_for
        return self.gradients

    def accumulate(self, gradients: Gradients, item: StepItem, number: int, checkpoint_rows: int | None) -> None:
        """Add the gradients of pack `number`, in pieces that fit into memory.

        A piece that does not fit is halved. This costs only time: none of its gradients have been added yet, and
        no rank waits for another here.

        Raises
        ------
        torch.OutOfMemoryError
            If a single table does not fit.
        """
        if item.step >= self.too_large_until:
            self.too_large = math.inf
        pieces = [item.packs[number]]
        done = 0  # tables
        while pieces:
            # A piece as large as one that did not fit is halved without trying it.
            piece = pieces.pop(0)
            tables = len(piece)
            tokens = self.tokens_of(piece)
            if tables > 1 and tokens >= self.too_large:
                pieces[:0] = piece.halves()
                continue
            self.seed_torch(item.step, self.rank, number, done, "dropout")
            try:
                self.add_gradients(gradients, piece, tables / item.tables, checkpoint_rows)
                fits = True
            except torch.OutOfMemoryError as error:
                if tables == 1:
                    rows, _, features = piece.shapes[0]
                    raise torch.OutOfMemoryError(
                        f"a table of {rows} rows and {features} features (step {item.step}) does not fit into memory: "
                        f"lower the curriculum's rows or model.checkpoint_rows; {error}"
                    ) from None
                fits = False
            if fits:
                done += tables
                continue
            # Halve it. This is not in the exception handler, whose traceback keeps the activations alive.
            self.too_large = tokens
            self.too_large_until = item.step + RETRY
            torch.cuda.empty_cache()
            what = f"{tables} tables of {tokens:,} tokens did not fit at step {item.step}"
            print_line(f"memory    {what} on rank {self.rank}; packs of this size are halved for {RETRY:,} steps")
            pieces[:0] = piece.halves()

    def seed_torch(self, *address: int | str) -> None:
        """Seed torch's generators, of the host and in a run on a GPU of all devices, by an address within the run.

        So a network, an objective or an optimizer that draws random numbers from torch draws the same ones in a run
        that was stopped and resumed, although checkpoints hold no random state.
        """
        seed = int(rng_at(self.seed, *address).integers(2**63))
        if self.device.type == "cpu":
            # Until CUDA is started, torch.manual_seed formats the stack at each call, for an error of a later start:
            # 0.3 ms, three times in a step of one pack.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def tokens_of(self, pack: Pack) -> int:
        """Count the tokens of a pack."""
        return sum(self.model.pack_tokens(self.model.config, N, M) for N, _, M in pack.shapes)

    def add_gradients(
        self, gradients: Gradients, pack: Pack, weight: float, checkpoint_rows: int | None = None
    ) -> Tensor:
        """Add the gradients of the mean loss of a pack, all of them or, if memory runs out, none.

        Parameters
        ----------
        gradients : Gradients
            What they are added to.
        pack : Pack
            B tables.
        weight : float
            Factor of the mean loss.
        checkpoint_rows : int, optional
            If a table has more rows than this, activations are recomputed in the backward pass. Default: the setting
            of the model.

        Returns
        -------
        Tensor
            (B,), the losses of the tables, detached.
        """
        # In a pass, the 16-bit copies of the weights take the place of the weights.
        in_place = nullcontext if gradients.casts is None else gradients.casts.in_place

        def predict(*arguments: Any) -> Any:
            with in_place():
                return self.model(*arguments)

        losses = query_losses(self.model, pack, checkpoint_rows, self.objective, self.auxiliary, predict)
        refuse_detached(losses, self.objective)
        loss = losses.mean()
        # Only without autocast do parts in fp32 get fp32 gradients.
        with torch.autocast(self.device.type, enabled=False):
            scaled = loss * (weight * self.loss_scale.scale)
            # Blocks that are recomputed read the copies again.
            with in_place():
                values = torch.autograd.grad(scaled, gradients.inputs, allow_unused=True)
            gradients.add(values, loss.detach() * weight)
        return losses.detach()

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Add the number of skipped steps, the loss scale, the inherited range, and what computed attention."""
        checkpoint["uses_kernels"] = self.uses_kernels
        checkpoint["skipped"] = self.skipped
        checkpoint["inherited_range"] = self.inherited_range
        checkpoint["loss_scale"] = self.loss_scale.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Load what `on_save_checkpoint` added; the state of another optimizer is dropped from the checkpoint."""
        self.skipped.copy_(checkpoint["skipped"].to(self.skipped.device))
        self.inherited_range = checkpoint["inherited_range"]
        self.load_loss_scale(checkpoint)
        # What computed attention, which files of version 0.2.0 do not say.
        names = {False: "PyTorch", True: "the kernels of this package"}
        before = checkpoint.get("uses_kernels", self.uses_kernels)
        if before != self.uses_kernels:
            info(f"changed   attention was computed by {names[before]}, now by {names[self.uses_kernels]}")
        # With resume.allow_changes the optimizer may be another one, which the state does not fit.
        if checkpoint["config"]["optimizer"]["name"] != self.optimizer_config.name:
            checkpoint["optimizer_states"] = []

    def go_back(self, checkpoint: dict, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Load weights, optimizer and loss scale of an earlier checkpoint of this run, which continues at `step`."""
        # Graphs that were captured with the old state are not replayed any more.
        self.states_replaced += 1
        self.load_state_dict(checkpoint["state_dict"])
        needs_new_state = checkpoint["config"]["optimizer"]["name"] != self.optimizer_config.name
        # A stage between the checkpoint and `step` may begin with a fresh optimizer.
        for skipped_step in range(checkpoint["global_step"], step):
            _, stage, stage_step = stage_at(self.curriculum, skipped_step)
            if stage_step == 0 and stage.fresh_optimizer:
                needs_new_state = True
        if needs_new_state:
            self.empty_state(optimizer)
        else:
            optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        self.load_loss_scale(checkpoint)

    def load_loss_scale(self, checkpoint: dict) -> None:
        """Load the loss scale if checkpoint and run are both fp16; a run whose precision has changed starts anew."""
        # `auto` never chooses fp16.
        if self.precision.name == checkpoint["config"]["trainer"]["precision"] == "fp16":
            self.loss_scale.load_state_dict(checkpoint["loss_scale"])
