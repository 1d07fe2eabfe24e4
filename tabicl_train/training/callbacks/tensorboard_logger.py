"""Writes the curves of a run for TensorBoard, in its directory `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoardLogger:
    """Write event files, one for each start of the run; a file is opened with the first values.

    Parameters
    ----------
    folder : Path
        The run directory.
    step : int
        Optimizer steps done at this start.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder / "tensorboard"
        # TensorBoard discards steps from this one on that earlier files hold. The validation at the step of the
        # checkpoint is not repeated, except before the first step.
        self.purge_step = step + 1 if step else 0
        self.writer: Any = None

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=self.purge_step, flush_secs=10)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, step)

    def close(self, exit_code: int = 0) -> None:
        if self.writer is not None:
            self.writer.close()
