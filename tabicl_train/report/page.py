"""The report: one self-contained HTML page about one or several runs."""

from __future__ import annotations

import base64
import io
import numbers
import os
import shlex
import time
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from tabicl_train.errors import ConfigError
from tabicl_train.outputs import check_output
from tabicl_train.report.sections import Run, holds_run, read_run, sections

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_report(folders: list[Path], output: Path) -> None:
    """Write a page about runs; raises ConfigError for a folder without one, and if it cannot be written."""
    problems = [f"run_dir is '{folder}'; there is no run in it" for folder in folders if not holds_run(folder)]
    if problems:
        raise ConfigError(problems)
    check_output(output)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        parent = os.path.commonpath([folder.resolve() for folder in folders])
        names = [str(folder.resolve().relative_to(parent)) for folder in folders]  # full paths would fill the legends
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    output.write_text(render(runs), encoding="utf-8")


def render(runs: list[Run]) -> str:
    return fill(TEMPLATE, runs=runs, **sections(runs))


def fill(template: Path, **variables: Any) -> str:
    """Fill a template that extends the layout of this folder, with the filters `table`, `png` and `command`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"table": table, "png": png, "command": shlex.join}
    written = time.strftime("%Y-%m-%d %H:%M")
    return environment.get_template(template.name).render(written=written, **variables)


def png(figure: Figure) -> str:
    """Convert a figure to a PNG file, in base64."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode()


def table(frame: pd.DataFrame) -> Markup:
    """Convert a frame to an HTML table, with empty cells for None and nan; aligned to the left if it holds any text."""
    has_text = frame.map(lambda value: isinstance(value, str)).any(axis=None)
    kind, formatters = "text" if has_text else "numbers", [cell] * frame.shape[1]
    frame = frame.rename_axis(index=None, columns=frame.index.name)  # otherwise the name takes a row of its own
    frame = frame.astype(object).where(frame.notna(), "")
    html = frame.to_html(formatters=formatters, classes=kind, border=0, justify="left")
    return Markup(html.replace(' style="text-align: left;"', ""))  # the page's style sheet aligns the head


def cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
