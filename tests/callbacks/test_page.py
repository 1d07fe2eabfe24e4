"""The callback that the page on additions adds, in a run."""

import re
from pathlib import Path

from runs import metrics, read
from short_runs import run

PAGE = (Path(__file__).parents[2] / ".github/CONTRIBUTING.md").read_text().partition("## Add a callback")[2]


def test_a_callback_can_be_added_as_the_page_says(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, example := {})
    settings = ["curriculum.stages.smoke.learning_rate=0.5", "checkpoint.every=100"]
    for steps in (2, 4):  # resumed at step 2
        callback = eval("LowestLoss()", example)
        run(tmp_path / "run", f"trainer.max_steps={steps}", *settings, callbacks=(callback,))
    losses = [float(row["loss"]) for row in metrics(tmp_path / "run")]
    assert losses[2] > min(losses[:2])  # so that the lowest one must have been kept
    assert [float(row["lowest"]) for row in read(tmp_path / "run/lowest_loss.csv")] == [
        min(losses[:number]) for number in range(1, 5)
    ]
