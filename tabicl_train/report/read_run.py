"""The files of a run directory, read for its report."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tabicl_train.callbacks.held_out.answer import NAME as ANSWER
from tabicl_train.config.schema import flatten
from tabicl_train.run_dir.records import Records, csv_text
from tabicl_train.run_dir.status import read_status

TABLES = ("metrics", "batches", "scaling", "validation", "evaluation")


@dataclass
class Run:
    """The content of a run's files; None for a file that is missing or has no rows, [] for missing lines."""

    name: str
    folder: Path
    config: dict[str, Any] | None  # by dotted names
    status: dict | None
    starts: list[dict]  # from provenance.jsonl
    incidents: list[dict]
    metrics: pd.DataFrame | None
    batches: pd.DataFrame | None
    scaling: pd.DataFrame | None
    validation: pd.DataFrame | None
    evaluation: pd.DataFrame | None
    attention: pd.DataFrame | None  # from entropy/entropy.csv, which tabicl-lab writes
    answer: dict | None  # from answer.json: what the training has gained


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "metrics.csv").is_file()


def read_run(folder: Path, name: str) -> Run:
    config, records = folder / "config.yaml", Records(folder)
    return Run(
        name,
        folder,
        flatten(yaml.safe_load(config.read_text())) if config.is_file() else None,
        read_status(folder),
        records.lines("provenance.jsonl"),
        records.lines("incidents.jsonl"),
        *(read_table(records, f"{table}.csv") for table in TABLES),
        read_table(Records(folder / "entropy"), "entropy.csv"),
        records.json(ANSWER),
    )


def read_table(records: Records, name: str) -> pd.DataFrame | None:
    """A CSV file without a torn last line; None if it has no rows."""
    rows = records.rows(name)
    return pd.read_csv(io.StringIO(csv_text([rows[0], *(row.values() for row in rows)]))) if rows else None
