"""tabicl-train whose ranks kill themselves: killed_ranks.py FOLDER RANK:STEP,... key=value ...

Each kill happens once; a file in FOLDER notes it.
"""

import os
import signal
import sys
from pathlib import Path

import lightning as L

from tabicl_train import commands
from tabicl_train import train as training


class Kill(L.Callback):
    def __init__(self, folder: Path, kills: list[tuple[int, int]]) -> None:
        self.folder, self.kills = folder, kills

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        done = self.folder / f"killed-{trainer.global_rank}-{item.step}"
        if (trainer.global_rank, item.step) in self.kills and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, kills, *settings = sys.argv[1:]
    kill = Kill(Path(folder), [tuple(map(int, text.split(":"))) for text in kills.split(",")])
    chosen = training.run_callbacks
    training.run_callbacks = lambda *a: [kill, *chosen(*a)]
    sys.argv = ["tabicl-train", *settings]
    commands.train()
