"""The card of the weights in the package, tabicl_train/weights/README.md, with a picture of each loss curve.

    python tests/benchmarks/weights_card.py NAME=RUN_DIR [NAME=RUN_DIR]

NAME is that of a file in tabicl_train/weights without its suffix, RUN_DIR the run that it is from, with the scores of the
file in evaluation.csv. Both are made by

    tabicl-export checkpoint=RUN_DIR output=tabicl_train/weights/NAME.safetensors weights=best
    tabicl-evaluate checkpoint=NAME suite=rdatasets output=RUN_DIR/evaluation.csv
"""

import dataclasses
import sys
from pathlib import Path

import pandas as pd

from tabicl_train.config.schema import REAL_SCORES, judged_by
from tabicl_train.console import counted, markdown_table
from tabicl_train.evaluation.scores import FORMATS, THIS_MODEL, by_task, cell, judged, standing, summary_text
from tabicl_train.prediction.export import estimator_name, read_weights
from tabicl_train.prediction.hub_format import checksum, data, introduction, limits, scores, table, training
from tabicl_train.prediction.origin import Pretrained
from tabicl_train.report.figures import draw_training
from tabicl_train.report.page import Run, read_run
from tabicl_train.weights import FOLDER

INTRODUCTION = """# Weights in the package

`TabICLClassifier()` and `TabICLRegressor()` use them without a download. `mini` is the newest name of the task, and
`mini-regressor` or a dated name stand for one file wherever a checkpoint is read: `TabICLClassifier("mini-2026-12")`,
`init_weights=mini`, `tabicl-evaluate checkpoint=mini-regressor`. `tabicl-export checkpoint=mini output=mini.ckpt` writes
the file that the `tabicl` package loads. A name comes before a file that is called so; `./mini` is a path.

The weights have the license of this project, BSD-3-Clause. `tests/benchmarks/weights_card.py` writes this page."""


def section(name: str, run: Run) -> str:
    """Describe one file, and draw its picture."""
    path = FOLDER / f"{name}.safetensors"
    pretrained, content = read_weights(path), path.read_bytes()
    draw_training({name: run.metrics}, {} if run.validation is None else {name: run.validation}).savefig(
        FOLDER / f"{name}.png", dpi=60
    )
    facts = {
        "loaded by": f'`tabicl_train.{estimator_name(pretrained.config)}("{name.rpartition("-")[0]}")`',
        "file": f"{name}.safetensors, {len(content) / 1e6:.2f} MB",
        "SHA-256": f"`{checksum(content)}`",
        "license": "BSD-3-Clause",
    }
    without = dataclasses.replace(pretrained, origin=pretrained.origin | {"evaluation": []})
    parts = [f"# {name}", introduction(pretrained), table(["", ""], facts.items()), training(pretrained.origin)]
    parts += [effort(pretrained, run), f"![Loss]({name}.png)", data(pretrained.origin), *scores(without)]
    parts += [evaluation(run.evaluation), limits(pretrained)]
    return "\n\n".join(parts).replace("\n## ", "\n### ").replace("# ", "## ", 1)


def effort(pretrained: Pretrained, run: Run) -> str:
    """Tables, time and hardware: in total, and the starts of the run."""
    first, tables, stages = 0, [], pretrained.origin["config"]["curriculum"]["stages"].values()
    steps = [*run.metrics["step"].diff().fillna(run.metrics["step"].iloc[0])]
    for stage in stages:
        tables += [stage["tables"] * max(0, min(stage["steps"], pretrained.origin["step"] - first))]
        first += stage["steps"]
    per_step = run.metrics["stage"].map({k: s["tables"] for k, s in zip(stages_of(pretrained), stages, strict=True)})
    hours = (steps * per_step / run.metrics["tables_per_s"]).sum() / 3600
    rows = [
        [start["time"], start["step"], start["commit"][:12], machines(start.get("machines", []))] for start in run.starts
    ]
    status = run.status or {}
    return (
        f"The weights have seen {sum(tables):,} tables. All steps of the run took {hours:.2f} hours, without starting, "
        f"validating and saving; it {status.get('status', 'ended')} at {status.get('time', 'an unknown time')} after "
        f"{counted(len(rows), 'start')}:\n\n" + table(["time", "step", "commit", "hardware"], rows)
    )


def stages_of(pretrained: Pretrained) -> list[str]:
    return list(pretrained.origin["config"]["curriculum"]["stages"])


def machines(of_start: list[dict]) -> str:
    return "; ".join(counted(len(m["ranks"]), "rank") + f" on {m['gpu'] or m['cpu']}" for m in of_start)


def evaluation(results: pd.DataFrame) -> str:
    """Where the network stands, means, and the scores of every task, the best of them in bold."""
    by = judged_by(results)
    other = "log_loss" if by == "roc_auc" else "pinball"
    first, second = judged(results), by_task(results, other).dropna(axis=1, how="all")
    baselines = first.drop(columns=THIS_MODEL)
    lost = {name: int((first[THIS_MODEL] < values).sum()) for name, values in baselines.items()}
    sizes = results.drop_duplicates("data").set_index("data")[["rows", "features"]]
    lead = (first[THIS_MODEL] - baselines.max(axis=1)).sort_values(ascending=False)
    lines = [
        [task, *sizes.loc[task], *bold(first.loc[task], by, max), *bold(second.loc[task], other, min)]
        for task in lead.index
    ]
    names = [REAL_SCORES[by], FORMATS[other][0]]
    header = [f"{method}, {name}" for name, scored in zip(names, (first, second), strict=True) for method in scored]
    losses = ", ".join(f"{count} times to {name}" for name, count in lost.items())
    return (
        f"## Evaluation\n\n{standing(results)[0].upper()}{standing(results)[1:]}.\n\n```\n{summary_text(results)}\n```\n\n"
        f"By {names[0]} it is the best on {(lead >= 0).sum()} of {counted(len(lead), 'task')}, and loses {losses}. Means "
        f"of the splits of each task, the largest lead first; the best method is in bold.\n\n"
        + markdown_table(["task", "rows", "features", *header], lines)
    )


def bold(values: pd.Series, name: str, best) -> list[str]:
    texts = [cell(value, FORMATS[name][1]) for value in values]
    return [f"**{text}**" if value == best(values) else text for text, value in zip(texts, values, strict=True)]


def main(*arguments: str) -> None:
    runs = {name: read_run(Path(folder), name) for name, folder in (text.split("=", 1) for text in arguments)}
    for run in runs.values():
        if run.metrics is None or run.evaluation is None:
            sys.exit(f"error: {run.folder} needs metrics.csv and evaluation.csv")
    sections = [section(name, run) for name, run in runs.items()]
    (FOLDER / "README.md").write_text("\n\n".join([INTRODUCTION, *sections]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
