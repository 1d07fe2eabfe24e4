"""tabicl-train whose ranks get signals: signaled.py FOLDER RANK:STEP:SIGNAL,... KEY=VALUE ...

Each signal comes once, at the beginning of the step; a file in FOLDER notes it.
"""

import functools
import os
import signal
import sys
from pathlib import Path

from tabicl_train import cli
from tabicl_train.training import loop


class Signals:
    """signals: numbers by (rank, step)"""

    def __init__(self, folder: Path, signals: dict[tuple[int, int], int]) -> None:
        self.folder, self.signals = folder, signals

    def before_step(self, state, item) -> None:
        step = state.step
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
    loop.train = functools.partial(loop.train, callbacks=[signals])
    sys.argv = ["tabicl-train", *settings]
    cli.train()
