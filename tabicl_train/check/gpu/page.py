"""The files that tabicl-gpu-check writes: JSON for programs, and a page in Markdown with the same content."""

from __future__ import annotations

import json
from pathlib import Path

from tabicl_train.check.gpu.place import Row
from tabicl_train.console import markdown_table
from tabicl_train.outputs import write_atomically

JSON, PAGE, LOG = "gpu-check.json", "gpu-check.md", "log.txt"
NO_GPU = "torch finds no GPU: the checks run on the CPU with small sizes, and no figure here is that of a GPU"
# By the names that checks use: title, and how to read it.
TABLES = {
    "steps": ("Time of a step", "Planned sizes with random values. A share is extrapolated to a step by its FLOPs."),
    "kernels": ("Kernels", "The kernels that take most of the time of a step."),
    "memory": ("Memory", "The peak of a step with the packs of each stage that the plan expects to be the largest."),
    "run": ("A real run", "tabicl-train experiment=tabicl_v2, stopped by SIGTERM in the middle and continued."),
    "preflight": ("Preflight", "The same steps in two precisions. The multiplier is the largest one of attention."),
    "attention": ("Attention", "Errors are relative to the norm of an output or gradient in float64."),
    "figures": ("Other figures", "Relative errors, unless the line says otherwise."),
}


def write_files(output: Path, content: Row) -> None:
    """Write the JSON file and the page."""
    for name, text in ((JSON, json.dumps(content, indent=1)), (PAGE, page_of(content))):
        write_atomically((output / name).resolve(), lambda file, text=text: file.write(text.encode()))


def page_of(content: Row) -> str:
    """Return the page for the content of the JSON file."""
    # The results of all checks.
    checks = content["checks"]
    results = [check["result"] for check in checks]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    columns = ("name", "what", "result", "seconds", "why")
    parts = [
        f"# tabicl-gpu-check: {content['machine']['device']}",
        f"{counts}, within {content['minutes']:g} minutes, {content['written']}.",
        markdown_table(columns, [[check[name] for name in columns] for check in checks]),
    ]
    if not content["is_gpu"]:
        parts.insert(1, f"**{NO_GPU[0].upper()}{NO_GPU[1:]}.**")

    # Stack traces, the machine, and a table of each kind of rows.
    for check in checks:
        if check["trace"]:
            parts += [f"## {check['name']} has failed", f"```\n{check['trace'].rstrip()}\n```"]
    parts += [
        "## Machine",
        markdown_table(["what", "value"], [(k, measurement_cell(v)) for k, v in content["machine"].items()]),
    ]
    rows = [row for check in checks for row in check["rows"]]
    for table, (title, how) in TABLES.items():
        rows_of_table = [row for row in rows if row["table"] == table]
        if rows_of_table:
            names = list(dict.fromkeys(name for row in rows_of_table for name in row if name != "table"))
            cells = [[measurement_cell(row.get(name)) for name in names] for row in rows_of_table]
            parts += [f"## {title}", how, markdown_table(names, cells)]
    return "\n\n".join(parts) + "\n"


def measurement_cell(value: object) -> str:
    """Format a value as a cell of a table."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
