"""Writes folders as the package openml fills them, with made tables."""

import csv
from pathlib import Path

import numpy as np
import pandas as pd

from tabicl_train.evaluation.openml_cache import OPENML_TASKS, SERVER

XMLNS = 'xmlns:oml="http://openml.org/openml"'
TASK = """<oml:task {xmlns}>
  <oml:task_id>{task}</oml:task_id>
  <oml:task_name>Task {task}</oml:task_name>
  <oml:task_type_id>{kind}</oml:task_type_id>
  <oml:task_type>{kind_name}</oml:task_type>
  <oml:input name="source_data">
    <oml:data_set>
      <oml:data_set_id>{dataset}</oml:data_set_id>
      <oml:target_feature>{target}</oml:target_feature>
    </oml:data_set>
  </oml:input>
  <oml:input name="estimation_procedure">
    <oml:estimation_procedure>
      <oml:id>1</oml:id>
      <oml:type>crossvalidation</oml:type>
      <oml:data_splits_url>https://example.org/{task}</oml:data_splits_url>
      <oml:parameter name="number_repeats">{repeats}</oml:parameter>
      <oml:parameter name="number_folds">{folds}</oml:parameter>
    </oml:estimation_procedure>
  </oml:input>
</oml:task>
"""
DESCRIPTION = """<oml:data_set_description {xmlns}>
  <oml:id>{dataset}</oml:id>
  <oml:name>{name}</oml:name>
  <oml:version>1</oml:version>
  <oml:description>Made &amp; small</oml:description>
  <oml:format>ARFF</oml:format>
  <oml:url>https://example.org/{dataset}.arff</oml:url>
  <oml:parquet_url>https://example.org/{dataset}.pq</oml:parquet_url>
  <oml:file_id>{dataset}</oml:file_id>
  <oml:default_target_attribute>{target}</oml:default_target_attribute>
  {more}
</oml:data_set_description>
"""
FOLDS_HEADING = """@RELATION folds

@ATTRIBUTE type {TRAIN,TEST}
@ATTRIBUTE rowid INTEGER
@ATTRIBUTE repeat INTEGER
@ATTRIBUTE fold INTEGER

@DATA
"""
KIND_NAMES = {1: "Supervised Classification", 2: "Supervised Regression", 5: "Clustering"}


def table(rows: int, features: int, classes: int, seed: int) -> pd.DataFrame:
    """Make a table with a column of categories, one with missing values, and a target: numbers without classes."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, features))
    signal = X[:, 0] + 0.5 * rng.standard_normal(rows)
    frame = pd.DataFrame(X, columns=[f"x{i}" for i in range(features)])
    frame["x1"] = frame["x1"].where(rng.random(rows) > 0.1)
    frame["color"] = pd.Categorical(rng.choice(["red", "it's blue, mostly"], rows))
    if classes:
        ranks = np.argsort(np.argsort(signal))
        frame["target"] = pd.Categorical([f"c{rank * classes // rows}" for rank in ranks])
    else:
        frame["target"] = signal
    return frame


def write_task(
    folder: Path,
    task: int,
    frame: pd.DataFrame,
    kind: int = 1,
    repeats: int = 1,
    folds: int = 3,
    name: str = "made",
    ignored: tuple[str, ...] = (),
    row_id: str | None = None,
    form: str = "pq",
) -> None:
    """Write the files of a task and of its data set, whose number is the task's and 1,000."""
    dataset = task + 1000
    names = dict(xmlns=XMLNS, task=task, dataset=dataset, target="target", name=name)
    place = Path(folder) / SERVER / "tasks" / str(task)
    place.mkdir(parents=True)
    text = TASK.format(kind=kind, kind_name=KIND_NAMES[kind], repeats=repeats, folds=folds, **names)
    (place / "task.xml").write_text(text)
    (place / "datasplits.arff").write_text(FOLDS_HEADING + "".join(fold_lines(len(frame), repeats, folds)))

    place = Path(folder) / SERVER / "datasets" / str(dataset)
    place.mkdir(parents=True)
    more = [f"<oml:ignore_attribute>{column}</oml:ignore_attribute>" for column in ignored]
    if row_id is not None:
        more.append(f"<oml:row_id_attribute>{row_id}</oml:row_id_attribute>")
    (place / "description.xml").write_text(DESCRIPTION.format(more="\n  ".join(more), **names))
    (place / "features.xml").write_text(features_text(frame))
    if form == "pq":
        frame.to_parquet(place / f"dataset_{dataset}.pq", index=False)
    else:
        (place / "dataset.arff").write_text(arff_text(frame))


def fold_lines(rows: int, repeats: int, folds: int) -> list[str]:
    """Shuffle the rows for each repeat, and deal them out; the folds are not stratified."""
    lines = []
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(rows)
        for fold in range(folds):
            for place, row in enumerate(order):
                kind = "TEST" if place % folds == fold else "TRAIN"
                lines.append(f"{kind},{row},{repeat},{fold}\n")
    return lines


def features_text(frame: pd.DataFrame) -> str:
    lines = [f"<oml:data_features {XMLNS}>"]
    for index, (name, column) in enumerate(frame.items()):
        is_nominal = isinstance(column.dtype, pd.CategoricalDtype)
        kind = "nominal" if is_nominal else "numeric"
        values = column.cat.categories if is_nominal else []
        lines.append(f"<oml:feature><oml:index>{index}</oml:index><oml:name>{name}</oml:name>")
        lines.append(f"<oml:data_type>{kind}</oml:data_type>")
        lines += [f"<oml:nominal_value>{value}</oml:nominal_value>" for value in values]
        lines.append("</oml:feature>")
    return "\n".join([*lines, "</oml:data_features>\n"])


def arff_text(frame: pd.DataFrame) -> str:
    def quoted(value: object) -> str:
        return "'" + str(value).replace("'", "\\'") + "'"

    lines = ["@RELATION made"]
    for name, column in frame.items():
        if isinstance(column.dtype, pd.CategoricalDtype):
            lines.append(f"@ATTRIBUTE {name} {{{','.join(map(quoted, column.cat.categories))}}}")
        else:
            lines.append(f"@ATTRIBUTE {name} REAL")
    lines.append("@DATA")
    for row in frame.itertuples(index=False):
        cells = ["?" if pd.isna(v) else quoted(v) if isinstance(v, str) else repr(float(v)) for v in row]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def write_protocols(folder: Path, rows: int = 60, features: int = 3) -> None:
    """Write made tables in the place of the tasks of all protocols."""
    with open(OPENML_TASKS, newline="") as file:
        for row in csv.DictReader(file):
            task = int(row["task"])
            kind, classes = (1, 2 + task % 2) if row["predicts"] == "classes" else (2, 0)
            write_task(folder, task, table(rows, features, classes, task), kind, name=row["name"])
