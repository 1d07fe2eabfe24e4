"""Stopping a run from outside without losing anything."""

from __future__ import annotations

import signal

import lightning as L


class Preemption(L.Callback):
    """SIGTERM, SIGINT or SIGUSR1 on any rank ends the run after the step, with a checkpoint."""

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False

    def on_train_start(self, trainer: L.Trainer, module) -> None:
        def ask(number, frame) -> None:
            self.asked = True

        self.handlers = {number: signal.signal(number, ask) for number in self.signals}

    def on_train_batch_end(self, trainer: L.Trainer, module, *_) -> None:
        if trainer.world_size > 1:
            self.asked = bool(trainer.strategy.reduce_boolean_decision(self.asked, all=False))
        trainer.should_stop = trainer.should_stop or self.asked

    def on_train_end(self, trainer: L.Trainer, module) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
