"""The Lightning module: one stream item in, one optimiser step out."""

from __future__ import annotations

import contextlib
import dataclasses

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from priors.table import rng_at
from tabicl_train.config import RunConfig
from tabicl_train.curriculum import stage_at
from tabicl_train.model import TabICL
from tabicl_train.optimizer import build_optimizer
from tabicl_train.schedules import learning_rate
from tabicl_train.stream import StepItem

MODULES = {"column": "col_embedder", "row": "row_interactor", "icl": "icl_predictor"}
MAX_SKIPPED = 10  # non-finite steps in a row after which a run stops: the weights are beyond help by then


class Pretraining(L.LightningModule):
    """Optimises a TabICL on the stream; manual optimisation, so that steps, items and checkpoints count alike."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.model = TabICL(dataclasses.replace(config.model))  # its own copy: stages set checkpoint_rows
        self.loss = torch.zeros(())  # of the last step, this rank's share
        self.batch_losses: list[Tensor] = []  # of the last step, one a micro-batch of this rank
        self.grad_norm = torch.zeros(())
        self.skipped = 0  # steps of non-finite gradient, all in all
        self.skipped_in_a_row = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def transfer_batch_to_device(self, batch: StepItem, device: torch.device, dataloader_idx: int) -> StepItem:
        return batch.to(device)

    def training_step(self, item: StepItem, _: int) -> None:
        if item.step != self.global_step:
            raise RuntimeError(f"the stream is at step {item.step}, the trainer at {self.global_step}")
        _, stage, stage_step = stage_at(self.config.curriculum, item.step)
        optimizer = self.optimizers()
        if stage_step == 0 and stage.fresh_optimizer:
            optimizer.state.clear()
        if stage.checkpoint_rows is not None:
            self.model.config.checkpoint_rows = stage.checkpoint_rows
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, stage_step)
            group["weight_decay"] = stage.weight_decay if group["decayed"] else 0.0

        self.batch_losses = []
        for k, batch in enumerate(item.batches):
            if self.config.model.dropout > 0:  # the trainer's random state is not saved; the address replaces it
                rng = rng_at(self.config.seed, item.step, self.global_rank, k, "dropout")
                torch.manual_seed(int(rng.integers(2**63)))
            with self.sync(last=k == len(item.batches) - 1):
                loss = query_loss(self.model, batch)
                # DDP averages over ranks; the step's loss is a sum over tables.
                self.manual_backward(loss * (batch.X.shape[0] / item.tables * self.trainer.world_size))
            self.batch_losses.append(loss.detach())

        weights = [batch.X.shape[0] / item.tables for batch in item.batches]
        self.loss = sum(w * loss for w, loss in zip(weights, self.batch_losses, strict=True))
        for part in stage.frozen:  # their gradients are exchanged all the same: DDP expects every parameter's
            getattr(self.model, MODULES[part]).zero_grad(set_to_none=True)
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), stage.clip)
        self.skip_if_not_finite(item)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def sync(self, last: bool) -> contextlib.AbstractContextManager:
        """Gradients are exchanged once a step, with the last micro-batch; a single device has nothing to block."""
        if last or not hasattr(self.trainer.strategy, "block_backward_sync"):
            return contextlib.nullcontext()
        return self.trainer.strategy.block_backward_sync()

    def skip_if_not_finite(self, item: StepItem) -> None:
        """Drop the gradients of a step whose norm is not finite (the norm is equal on all ranks).

        The optimiser then has nothing to update, but the step counts, as stream and trainer count alike.
        """
        if torch.isfinite(self.grad_norm):
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.model.zero_grad(set_to_none=True)
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise FloatingPointError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row, the last one step {item.step}; "
                "lower the learning rate or use trainer.precision=fp32, and start again from an earlier checkpoint"
            )

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["skipped"] = self.skipped

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.skipped = checkpoint["skipped"]


def query_loss(model: torch.nn.Module, batch) -> Tensor:
    """Mean cross entropy over the query rows of a TableBatch, (), in fp32."""
    logits = model(batch.X, batch.y[:, : batch.train_size])  # (B, n_query, C)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.y[:, batch.train_size :].flatten())
