"""Compare two commits: the tables that their priors draw, and what short runs on the CPU train, to the last bit.

    python tests/benchmarks/compare_commits.py OLD NEW [folder=compare] [cases=tables,two_ranks] [limit=600]

OLD and NEW are commits, for which worktrees are made, or paths of checkouts. Results and logs lie in FOLDER/COMMIT-old
and FOLDER/COMMIT-new; those of a commit are not computed again while its cases are the same, and those of a checkout
are computed each time. `cases` are the names of runs, of table cases, or `tables` for all of these; `limit` is in
seconds, for each run.

What has another name in NEW than in OLD belongs in the dictionaries RENAMED_*. Columns of times are ignored, and
columns that only one of the two has are listed. The exit code is 1 if anything differs or fails.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

RENAMED_OPTIONS: dict[str, str] = {}  # "prior.node_noise": "prior.noise", "prior=mix_scm": "prior=mixture"; "" drops it
RENAMED_COLUMNS: dict[str, str] = {}  # "metrics.csv lr": "metrics.csv learning_rate"
RENAMED_CHECKPOINT_KEYS: dict[str, str] = {}  # "callbacks.Averages": "callbacks.averages"; so are keys below them

FILES = ("metrics.csv", "validation.csv", "scaling.csv")
ALWAYS = FILES[:2]  # which every run must have
TIMES = {"tables_per_s", "cells_per_s", "data_wait", "tflops_per_s", "peak_share", "memory_gb", "seconds"}
PARTS = ("state_dict", "optimizer_states", "callbacks.Averages")  # of a checkpoint

# Tables: copies of the cases of tests/priors/test_stream_version.py, and realism.
OWN_TABLES = "OWN_TABLES"  # stands for a folder of them
REALISM = {name: 0.5 for name in ("missing", "tails", "rounding", "shift", "imbalance", "duplicates")}
PRIORS: dict[str, tuple[str, dict]] = {
    "dummy": ("dummy", {}),
    "graph_scm": ("graph_scm", {}),
    "graph_scm released": ("graph_scm", {"preset": "released"}),
    "graph_scm with all options": (
        "graph_scm",
        {"node_noise": True, "filter_unpredictable_graphs": False},
    ),
    "mlp_scm": ("mlp_scm", {}),
    "mlp_scm causal": ("mlp_scm", {"causal": True}),
    "tree_scm": ("tree_scm", {}),
    "mix_scm": ("mix_scm", {}),
    "mix_scm realism": ("mix_scm", {"realism": REALISM}),
    "needle": ("needle", {}),
    "tables": ("tables", {"folder": OWN_TABLES, "validation_fraction": 0.0, "test_fraction": 0.0}),
    "one_table": ("one_table", {"file": f"{OWN_TABLES}/table0.csv", "target": "size"}),
    "quantifiers": ("quantifiers", {"undecided": True}),
    "linear_functions": ("linear_functions", {}),
}
CLASSES_ONLY, NUMBERS_ONLY = ("needle", "quantifiers"), ("linear_functions",)
REAL = ("tables", "one_table")  # which have no long tables
SMALL = {"num_rows": 40, "train_size": 20, "num_features": 3}
LARGE = {"num_rows": 150, "train_size": 100, "num_features": 12, "max_classes": 5, "group_seed": (0, 1)}
LONG = {"num_rows": 600, "train_size": 400, "num_features": 20}
ADDRESSES = [(SMALL, seed) for seed in (4, 9, 10, 12, 13, 14)] + [(LARGE, seed) for seed in (2, 5, 6, 11)]
TABLES = {
    f"{name}{kind}": {
        "prior": prior,
        "options": options,
        "spec": spec | {"keeps_missing": name == "mix_scm realism"},
        "addresses": ADDRESSES if name in REAL else [*ADDRESSES, *((LONG, seed) for seed in (0, 4, 6, 10))],
    }
    for name, (prior, options) in PRIORS.items()
    for kind, spec, others in ((" classes", {}, NUMBERS_ONLY), (" numbers", {"max_classes": 0}, CLASSES_ONLY))
    if name not in others
}

# Runs of a few steps, several of them in more than one pack.
BASE = [
    "experiment=smoke", "trainer.accelerator=cpu", "trainer.log_every=1", "stream.num_workers=1",
    "checkpoint.every=5", "validation.every=4", "validation.best=synthetic", "validation.rows=[40]",
    "validation.tables=4", "validation.features=[2,4]", "validation.real_rows=0",
]  # fmt: skip
SMOKE = ["curriculum.stages.smoke.steps=12"]
AVERAGES = ["averages.ema=0.9", "averages.last=3", "averages.every=2"]
RUNS = {
    "graph_scm_muon": [*SMOKE, *AVERAGES, "prior=graph_scm", "optimizer=muon", "validation.real_rows=60"],
    "mix_scm_realism_adamw": [
        *SMOKE, *AVERAGES, "prior=mix_scm", *(f"prior.realism.{name}={share}" for name, share in REALISM.items()),
        "model.missing_values=true", "optimizer=adamw", "stream.num_workers=0",
        "curriculum.stages.smoke.pack_tokens=500",
    ],
    "regression_muon_all": [
        *SMOKE, "task=regression", "model.num_quantiles=99", "prior=graph_scm", "optimizer=muon_all",
        "averages.last=2", "averages.every=5",
    ],
    "stages_clip_frozen": [
        *(f"+curriculum.stages.stage{number}.tables=4" for number in (1, 2, 3)), "~curriculum.stages.smoke",
        "prior=mlp_scm", "stream.num_workers=2", "averages.ema=0.99", "model.dropout=0.1",
        *(
            f"curriculum.stages.stage{number}.{value}"
            for number in (1, 2, 3)
            for value in ("steps=5", "rows=[30,50]", "features=[2,4]", "group_size=2")
        ),
        "curriculum.stages.stage2.fresh_optimizer=false", "curriculum.stages.stage3.frozen=[column]",
        "curriculum.stages.stage1.clip=0.1", "curriculum.stages.stage2.schedule=wsd",
    ],
    "bf16": [*SMOKE, "prior=dummy", "trainer.precision=bf16", "optimizer=muon"],
    "fp16": [*SMOKE, "prior=dummy", "trainer.precision=fp16", "optimizer=adamw"],
    "sequences": [
        "model=sequence_tiny", "prior=quantifiers", "curriculum=sequences", "curriculum.stages.sequences.steps=8",
        "curriculum.stages.sequences.tables=8", "curriculum.stages.sequences.group_size=4", "optimizer=adamw",
        "curriculum.stages.sequences.features=[2,4]",
    ],
    "resumed": [*SMOKE, *AVERAGES, "prior=graph_scm", "optimizer=muon", "validation.real_rows=60"],
    "two_ranks": [
        *SMOKE, *AVERAGES, "prior=mix_scm", "trainer.devices=2", "curriculum.stages.smoke.pack_tokens=500",
    ],
    "two_ranks_dropout_realism_regression": [
        *SMOKE, *AVERAGES, "task=regression", "model.num_quantiles=99", "prior=mix_scm", "trainer.devices=2",
        "model.dropout=0.1", "model.missing_values=true", "prior.realism.missing=0.5", "optimizer=adamw",
    ],
}  # fmt: skip
KNOWN = [*TABLES, *RUNS]


def write_own_tables(folder: Path) -> None:
    """CSV files of 150, 200, 250 and 300 rows, with missing values, categories, dates and truth values."""
    import numpy as np
    import pandas as pd

    for number in range(4):
        rows, rng = 150 + 50 * number, np.random.default_rng(number)
        x, group = rng.normal(size=rows), rng.choice(["red", "green", "blue"], rows)
        columns = {
            "x": np.round(x, 6),
            "gaps": np.where(rng.random(rows) < 0.2, np.nan, np.round(rng.exponential(size=rows), 6)),
            "group": group,
            "day": pd.date_range("2020-01-01", periods=rows).strftime("%Y-%m-%d"),
            "flag": rng.random(rows) < 0.4,
            "size": rng.integers(0, 5, rows),
            "price": np.round(rng.normal(size=rows) + x, 6),
            "label": np.where(x + (group == "red") > 0.5, "yes", "no"),
        }
        pd.DataFrame(columns).to_csv(folder / f"table{number}.csv", index=False)


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def draw(output: Path, cases: dict[str, dict]) -> None:
    """In a process that imports the priors of one commit: draw the tables of some cases and write their digests."""
    import tabicl_train.lab  # noqa: F401 - which registers priors, in commits in which priors/ has not all of them
    from priors import TableSpec, build_prior

    with tempfile.TemporaryDirectory() as place:
        write_own_tables(Path(place))
        for name, case in cases.items():
            found: dict[str, Any] = {}
            try:
                options = json.loads(json.dumps(case["options"]).replace(OWN_TABLES, place))
                prior = build_prior(case["prior"], **options)
                for address, seed in case["addresses"]:
                    group = {"group_seed": tuple(address["group_seed"])} if "group_seed" in address else {}
                    table = prior.sample(TableSpec(**(address | case["spec"] | group)), (seed, 0))
                    found |= {
                        f"{address['num_rows']} rows, seed {seed}, {part}": value
                        for part, value in (
                            ("X", digest(table.X)), ("y", digest(table.y)), ("labeled rows", table.train_size),
                            ("classes", table.num_classes), ("rejections", dict(sorted(table.rejections.items()))),
                        )
                    }  # fmt: skip
            except Exception:
                print(f"{name}:\n{traceback.format_exc()}", flush=True)
                continue
            write(output, name, case, {"exact": found})


def write(folder: Path, name: str, settings: Any, found: dict) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"settings": settings, **found}, indent=1) + "\n")


def stored(folder: Path, name: str, settings: Any) -> dict | None:
    """The result of a case, if there is one of the same settings."""
    path = folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else None
    return found if found and found["settings"] == json.loads(json.dumps(settings)) else None


def call(command: list[str], tree: Path, folder: Path, log: Path, limit: float) -> int | str:
    """Run Python with the packages of a worktree, in a folder outside of it; exit code or "time limit"."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Digests of tensors, and other values as text, by their dotted names."""
    if isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {name: value for key, part in items for name, value in flat(part, f"{prefix}{key}.").items()}
    return {prefix[:-1]: digest(content) if isinstance(content, torch.Tensor) else repr(content)}


def read_run(run_dir: Path) -> dict:
    """The CSV files of a run, and what its newest checkpoint holds."""
    files = {}
    for name in FILES:
        if (run_dir / name).exists():
            with open(run_dir / name, newline="") as file:
                files[name] = list(csv.DictReader(file))
    newest = max((run_dir / "checkpoints").glob("step-*.ckpt"), key=lambda path: int(path.stem.split("-")[1]))
    return {"files": files, "checkpoint": flat(torch.load(newest, map_location="cpu", weights_only=True))}


def renamed(name: str, names: dict[str, str], separator: str) -> str:
    """A name of OLD in NEW, if it or what it begins with has another one."""
    for old, new in names.items():
        if name == old or name.startswith(old + separator):
            return new + name.removeprefix(old) if new else ""
    return name


def renamed_setting(setting: str) -> str:
    if setting in RENAMED_OPTIONS:
        return RENAMED_OPTIONS[setting]
    key, _, value = setting.partition("=")
    return f"{key}={value}" if (key := renamed(key, RENAMED_OPTIONS, ".")) else ""


def renamed_case(case: dict) -> dict:
    names = {f"prior.{option}": value for option, value in case["options"].items()}
    new = {renamed(name, RENAMED_OPTIONS, "."): value for name, value in names.items()}
    options = {name.removeprefix("prior."): value for name, value in new.items() if name}
    prior = renamed_setting(f"prior={case['prior']}").removeprefix("prior=")
    return case | {"prior": prior, "options": options}


def results(tree: Path, folder: Path, cases: list[str], is_new: bool, limit: float) -> dict[str, dict]:
    """What a worktree gives in each case, computed where it is not stored; {} for one that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    check = ["-c", "import priors, tabicl_train; print(priors.__file__, tabicl_train.__file__)"]
    code = call(check, tree, folder, folder / "imports.log", limit)
    *_, paths = ["", *(folder / "imports.log").read_text().splitlines()]
    if code != 0 or not all(Path(path).is_relative_to(tree) for path in paths.split()):
        sys.exit(f"error: the packages of {tree} are not imported, see {folder / 'imports.log'}")
    tables = {name: renamed_case(TABLES[name]) if is_new else TABLES[name] for name in cases if name in TABLES}
    runs = {name: RUNS[name] for name in cases if name in RUNS}
    runs = {name: [*BASE, *settings] for name, settings in runs.items()}
    if is_new:
        runs = {name: [new for s in settings if (new := renamed_setting(s))] for name, settings in runs.items()}
    missing = {name: case for name, case in tables.items() if stored(folder, name, case) is None}
    if missing:
        for name in missing:
            (folder / f"{name}.json").unlink(missing_ok=True)
        command = [__file__, "draw", str(folder), json.dumps(missing)]
        if (code := call(command, tree, folder, folder / "tables.log", limit)) != 0:
            print(f"tables: exit code or end: {code}, see {folder / 'tables.log'}", flush=True)
    found = {name: stored(folder, name, case) or {} for name, case in tables.items()}
    for name, settings in runs.items():
        if (known := stored(folder, name, settings)) is None:
            run_dir = folder / name
            shutil.rmtree(run_dir, ignore_errors=True)
            command = ["-m", "tabicl_train", *settings, f"run_dir={run_dir}"]
            code: int | str = 0
            if name == "resumed":  # in two starts
                code = call([*command, "trainer.max_steps=7"], tree, folder, folder / f"{name}.log", limit)
            if code == 0:
                code = call(command, tree, folder, folder / f"{name}.log", limit)
            if code == 0:
                known = read_run(run_dir)
                write(folder, name, settings, known)
            else:
                print(f"{name}: exit code or end: {code}, see {folder / name}.log", flush=True)
        found[name] = known or {}
    return found


def same(one: str, other: str) -> bool:
    """Whether two cells are equal, as text or as numbers."""
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def file_difference(name: str, old: list[dict], new: list[dict]) -> str:
    """The first cell that differs, or ""; by columns of both."""
    if len(old) != len(new):
        return f"{name}: {len(old)} rows, {len(new)} rows"
    for number, (one, other) in enumerate(zip(old, new, strict=True)):
        for column in one:
            if column in other and column not in TIMES and not same(one[column], other[column]):
                return f"{name}, row {number}, step {one.get('step')}: {column} is {one[column]}, {other[column]}"
    return ""


def first_different(old: dict, new: dict) -> str:
    for key in [*old, *(key for key in new if key not in old)]:
        if key not in old or key not in new:
            return f"{key} is only in {'OLD' if key in old else 'NEW'}"
        if old[key] != new[key]:
            return f"{key} is {old[key]}, {new[key]}"
    return ""


def with_new_columns(name: str, rows: list[dict]) -> list[dict]:
    columns = {column: renamed(f"{name} {column}", RENAMED_COLUMNS, "\n") for column in (rows[0] if rows else {})}
    return [{columns[column].removeprefix(f"{name} "): value for column, value in row.items()} for row in rows]


def compare(old: dict, new: dict) -> tuple[str, list[str]]:
    """The first difference between two results of a case, or "", and the columns that only one of them has."""
    for side, found in (("OLD", old), ("NEW", new)):
        if not found:
            return f"{side} failed, see its log", []
    if "exact" in old:
        return first_different(old["exact"], new["exact"]), []
    differences, one_sided = [], []
    for name in FILES:
        if name in ALWAYS and not (old["files"].get(name) and new["files"].get(name)):
            differences.append(f"{name} is missing or empty")
            continue
        one, other = with_new_columns(name, old["files"].get(name, [])), new["files"].get(name, [])
        columns = [set(rows[0]) if rows else set() for rows in (one, other)]
        one_sided += [f"{name} {column}" for column in sorted(columns[0] ^ columns[1])]
        if columns[0] & columns[1]:
            differences.append(file_difference(name, one, other))
    parts = [renamed(part, RENAMED_CHECKPOINT_KEYS, ".") + "." for part in PARTS]
    states = [{renamed(key, RENAMED_CHECKPOINT_KEYS, "."): value for key, value in old["checkpoint"].items()}]
    states += [new["checkpoint"]]
    chosen = [{k: v for k, v in state.items() if k.startswith(tuple(parts))} for state in states]
    if not chosen[0]:
        differences.append("the checkpoint has no weights")
    differences.append(first_different(*chosen))
    return next(filter(None, differences), ""), one_sided


def place_of(side: str, stack: contextlib.ExitStack) -> tuple[Path, str]:
    """Worktree of a commit, or the checkout itself, and the name of its results."""
    if Path(side).is_dir():
        return Path(side).resolve(), "checkout"
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.check_output([*git, "rev-parse", "--verify", f"{side}^{{commit}}"], text=True).strip()
    tree = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve() / "tree"
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
    stack.callback(subprocess.run, [*git, "worktree", "remove", "--force", str(tree)], check=True)
    return tree, commit[:12]


def main(old: str, new: str, folder: str = "compare", cases: str = "", limit: str = "600") -> bool:
    """Print a line for each case; whether all are equal."""
    names = [n for name in cases.split(",") for n in (TABLES if name == "tables" else [name])] if cases else KNOWN
    if unknown := [name for name in names if name not in KNOWN]:
        sys.exit(f"error: there is no case {unknown}; there are: tables; {'; '.join(KNOWN)}")
    found = []
    for side, is_new in ((old, False), (new, True)):
        with contextlib.ExitStack() as stack:
            tree, name = place_of(side, stack)
            place = Path(folder).resolve() / f"{name}-{'new' if is_new else 'old'}"
            if name == "checkout":
                shutil.rmtree(place, ignore_errors=True)
            print(f"{side}: results and logs in {place}", flush=True)
            found.append(results(tree, place, names, is_new, float(limit)))
    are_equal = True
    for name in names:
        difference, one_sided = compare(found[0][name], found[1][name])
        are_equal &= not difference
        line = f"{name}: {f'DIFFERENT: {difference}' if difference else 'equal'}"
        print(line + (f" (only on one side: {', '.join(one_sided)})" if one_sided else ""), flush=True)
    return are_equal


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        draw(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        texts = sys.argv[1:]
        options = dict(text.split("=", 1) for text in texts if "=" in text)
        sys.exit(0 if main(*(text for text in texts if "=" not in text), **options) else 1)
