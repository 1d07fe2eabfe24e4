"""Writes the curves of a run for TensorBoard as well.

Event files cannot be changed, and a kill cuts them off anywhere. So each start writes all curves anew from the files of
the run, and then empties the event files of the start before.
"""

from __future__ import annotations

import os
from typing import Any

from tabicl_train.callbacks.run_log import VALIDATION, LoggedValues, RunLog
from tabicl_train.config.schema import RunConfig
from tabicl_train.run_dir.records import Records

FLUSH = 10.0  # seconds after which curves are on the disk


class TensorBoardLog(RunLog):
    """On rank 0, writes what `LoggedValues` reads to the folder `tensorboard` of the run."""

    name = "tensorboard"

    def __init__(self, config: RunConfig, records: Records) -> None:
        super().__init__(config)
        self.records, self.folder = records, records.folder / "tensorboard"
        self.values = LoggedValues(records.folder)
        self.writer: Any = None

    def log_rows(self, is_finished: bool) -> None:
        if self.writer is None:
            self.rewrite()
        else:
            self.write_new()

    def rewrite(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.records.check()
        earlier = list(self.folder.glob("events.out.tfevents.*"))
        # A TensorBoard that is running discards what it has read from step 0 on.
        self.writer = SummaryWriter(self.folder, purge_step=0, flush_secs=FLUSH)
        self.write_new()
        self.writer.flush()
        for path in earlier:
            if path.stat().st_size:
                os.truncate(path, 0)  # not removed: TensorBoard may be reading it, and would not go on to the new one
            else:
                path.unlink()

    def write_new(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        while (step := self.values.next_step()) is not None:
            self.records.check()
            training, scores = self.values.take(step)
            scores.pop(f"{VALIDATION}step", None)
            curves = {key: value for key, value in (training | scores).items() if isinstance(value, (int, float))}
            # All curves of a step in one event: one by one, a run of 50,000 rows would take 90 s instead of 20 s.
            summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in curves.items()])
            self.writer.file_writer.add_summary(summary, step)

    def close(self, exit_code: int = 0) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()
