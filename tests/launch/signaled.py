"""tabicl-train whose ranks get signals: signaled.py FOLDER RANK:STEP:SIGNAL,... key=value ...

Each signal comes once, at the beginning of the step; a file in FOLDER notes it.
"""

import os
import signal
import sys
from pathlib import Path

from tabicl_train import commands
from tabicl_train import train as training


class Signals:
    """signals: numbers by (rank, step)"""

    def __init__(self, folder: Path, signals: dict[tuple[int, int], int]) -> None:
        self.folder, self.signals = folder, signals

    def on_train_batch_start(self, step, **_) -> None:
        rank = int(os.environ.get("RANK", 0))
        number = self.signals.get((rank, step))
        done = self.folder / f"signal-{rank}-{step}"
        if number is not None and not done.exists():
            done.touch()
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    folder, wanted, *settings = sys.argv[1:]
    triples = [text.split(":") for text in wanted.split(",") if text]
    signals = Signals(Path(folder), {(int(rank), int(step)): signal.Signals[name] for rank, step, name in triples})
    chosen = training.build_callbacks
    training.build_callbacks = lambda *a: [signals, *chosen(*a)]
    sys.argv = ["tabicl-train", *settings]
    commands.train()
