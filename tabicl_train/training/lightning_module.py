"""A run in a Trainer of Lightning, whose steps are bit-identical to those of `loop.py`.

No other file imports Lightning, which takes 7 CPU seconds.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import lightning as L
import torch

from priors.random import STREAM_VERSION
from priors.real import hash_of_tables
from tabicl_train.config.schema import RunConfig, configured_prior
from tabicl_train.run.checkpoint import FORMAT_VERSION
from tabicl_train.stream.curriculum import largest_tables
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import Loader
from tabicl_train.training.checks import check_machine, check_network
from tabicl_train.training.distributed.processes import Launch
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.loop import build_loader, build_stream
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.objectives import losses_of
from tabicl_train.training.rank_process import device_of, set_up_process
from tabicl_train.training.resume import refuse_changes
from tabicl_train.training.state import load_initial_weights, module_arguments, set_up_module

__all__ = ["Pretraining", "Tables"]


class Pretraining(TrainedNetwork, L.LightningModule):
    """The network of a run, trained by a Trainer with manual optimization; its tables are those of `Tables`.

    The Trainer ends after the last step of the curriculum, or earlier if its arguments say so. Seed, learning rate,
    clipping and precision are those of the configuration. Torch gets one thread and the settings of a run.

    Parameters
    ----------
    config : RunConfig
        The run. Everything other than its steps, such as validation, is left to the Trainer.
    """

    def __init__(self, config: RunConfig) -> None:
        set_up_process(config.trainer)  # before CUDA starts
        torch.manual_seed(config.seed)
        super().__init__(**module_arguments(config))
        self.automatic_optimization = False
        self.config = config
        load_initial_weights(self, config, Ranks())

    def setup(self, stage: str) -> None:
        """Move the network to its device and choose how it computes there, before a checkpoint is loaded.

        Raises
        ------
        ConfigError
            On all ranks, if the run cannot start, or if the Trainer contradicts the configuration.
        """
        trainer = self.trainer
        launch = Launch(trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices)
        ranks = Ranks(launch)
        ranks.connect(self.config.trainer.timeout)
        ranks.raise_on_all_ranks(self.contradictions() + check_machine(self.config, launch, uses_folder=False))
        set_up_module(self, self.config, ranks, trainer.strategy.root_device)
        ranks.raise_on_all_ranks(ranks.from_first(lambda: check_network(self)))

    def contradictions(self) -> list[str]:
        """List where the arguments of the Trainer contradict the configuration."""
        trainer = self.trainer
        problems = []
        if trainer.precision != "32-true":
            advice = "leave it out, and set trainer.precision of the configuration"
            problems.append(f"the Trainer's precision is {trainer.precision!r}; {advice}")
        configured = device_of(self.config.trainer, Launch()).type
        if trainer.strategy.root_device.type != configured:
            what = f"the Trainer computes on {trainer.strategy.root_device.type}, the configuration on {configured}"
            problems.append(f"{what}; set accelerator= of the one or trainer.accelerator of the other")
        if trainer.max_steps > self.config.total_steps:
            have = f"the configuration has {self.config.total_steps} steps"
            problems.append(f"the Trainer's max_steps is {trainer.max_steps}; {have}")
        return problems

    def training_step(self, batch: StepItem, batch_idx: int) -> None:
        """Take one optimizer step with this rank's tables, and log the loss and the gradient norm."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.train_on(batch, self.global_step, self.global_rank, optimizer)
        # Lightning's wrapper of the optimizer would count the step, but passes a closure, which ours do not take.
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        self.log_dict({"loss": self.loss, "grad_norm": self.grad_norm}, batch_size=batch.tables)
        if self.global_step == self.config.total_steps:
            self.trainer.should_stop = True

    def validation_step(self, batch: StepItem, batch_idx: int) -> None:
        """Log the mean loss of this rank's tables as val_loss."""
        with self.precision.autocast(self.device.type):
            losses = torch.cat([losses_of(self.model, pack) for pack in batch.packs])
        self.log("val_loss", losses.mean(), batch_size=len(losses), sync_dist=True)

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients, which are views of one tensor: if Lightning removed them, there would be no updates."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what an export, `init_weights` and `on_load_checkpoint` need."""
        super().on_save_checkpoint(checkpoint)
        prior = configured_prior(self.config.prior)
        checkpoint["format_version"] = FORMAT_VERSION
        checkpoint["config"] = asdict(self.config)
        checkpoint["largest_tables"] = largest_tables(self.curriculum, prior, self.config.model.is_regression)
        checkpoint["run"] = {
            "step": self.global_step,
            "stream_version": STREAM_VERSION,
            "real_tables": hash_of_tables(prior),
            "plugins": self.config.plugins_used(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load what `on_save_checkpoint` added; raises ConfigError if the checkpoint belongs to another run."""
        values = asdict(self.config) | {"run_dir": "the checkpoint"}
        real_tables = hash_of_tables(configured_prior(self.config.prior))
        refuse_changes(checkpoint, values, real_tables, self.config.plugins_used())
        super().on_load_checkpoint(checkpoint)


class Tables(L.LightningDataModule):
    """The tables of a run, from the Trainer's next step on; each rank draws its own share of them.

    Parameters
    ----------
    config : RunConfig
        The run.
    validation_steps : int
        Items of a validation: those of the first steps of a run with the next seed.
    """

    def __init__(self, config: RunConfig, validation_steps: int = 1) -> None:
        super().__init__()
        self.config = config
        self.validation_steps = validation_steps
        self.loader: Loader | None = None

    def stream(self) -> StepStream:
        """Return this rank's tables in all steps."""
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        return build_stream(self.config, self.trainer.global_rank, self.trainer.world_size, device)

    def setup(self, stage: str) -> None:
        """Start the workers, before the network is on a GPU; they wait for the first step."""
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        self.loader = build_loader(self.stream(), self.config.stream, device, self.trainer.num_devices, stage == "fit")

    def train_dataloader(self) -> Loader:
        """Return the loader of the steps that are left."""
        assert self.trainer is not None and self.loader is not None
        steps = range(self.trainer.global_step, self.config.total_steps)
        self.loader.stream = replace(self.loader.stream, steps=steps)
        return self.loader

    def val_dataloader(self) -> StepStream:
        """Return the items of a validation, which this process draws."""
        steps = range(self.validation_steps)
        return replace(self.stream(), seed=self.config.seed + 1, steps=steps, pads=False)

    def teardown(self, stage: str) -> None:
        """End the workers."""
        if self.loader is not None:
            self.loader.close()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers; otherwise the process would wait for them when it exits."""
        self.teardown("fit")
