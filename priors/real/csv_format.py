"""How CSV files are written: what separates their columns, the decimal mark of their numbers, and missing values.

The options `separator` and `decimal` of priors and commands take the name of a mark, since shells and Hydra read some
marks as something else, or the mark itself.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

AUTO = "auto"  # instead of the name of a separator, or among missing words for those of pandas
RECOGNIZED = ",;\t"  # separators that are found without an option
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "space": " ", "colon": ":"}
DECIMALS = {"point": ".", "comma": ","}
DECLARATION = re.compile(r'"?sep=(.)"?(\r\n|\r|\n)', re.IGNORECASE)  # a first line that tells Excel the separator
EXAMINED_LINES = 20
WORDS = " :"  # also divide texts and times, so that two parts prove nothing


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV file is written.

    Parameters
    ----------
    separator : str or None
        What separates columns; None: one of RECOGNIZED.
    decimal : str
        The decimal mark of numbers.
    missing : tuple of str
        Words that mean a missing value, as an empty cell does. AUTO stands for those that pandas takes for one; a
        target of texts keeps them.
    """

    separator: str | None = None
    decimal: str = "."
    missing: tuple[str, ...] = (AUTO,)


USUAL_FORMAT = CsvFormat()


def format_problems(separator: str, decimal: str, missing_words: Sequence[Any]) -> list[str]:
    """List what is wrong with the options `separator`, `decimal` and `missing_words`."""
    problems = []
    names = (AUTO, *SEPARATORS)
    is_mark = len(separator) == 1 and not separator.isalnum() and separator not in "\"'\r\n"
    if separator not in names and not is_mark:
        problems.append(f"separator is {separator!r}; it must be one of {', '.join(names)}, or another single mark")
    if decimal not in (*DECIMALS, *DECIMALS.values()):
        problems.append(f"decimal is {decimal!r}; it must be one of {', '.join(DECIMALS)}")
    for word in missing_words:
        if not isinstance(word, str):
            problems.append(
                f"missing_words has {word!r}, which is not text: put quotes around it, missing_words=['...']"
            )
    return problems


def csv_format(separator: str, decimal: str, missing_words: Sequence[str] = (AUTO,)) -> CsvFormat:
    """Return the format that the options describe; see format_problems."""
    mark = None if separator == AUTO else SEPARATORS.get(separator, separator)
    return CsvFormat(mark, DECIMALS.get(decimal, decimal), tuple(missing_words))


def without_declaration(text: str, form: CsvFormat = USUAL_FORMAT) -> tuple[str, CsvFormat]:
    """Return a CSV file without a first line such as `sep=;`, and its format; a given separator comes first."""
    declared = DECLARATION.match(text)
    if declared is None:
        return text, form
    return text[declared.end() :], replace(form, separator=form.separator or declared[1])


def separator_of(text: str, form: CsvFormat = USUAL_FORMAT) -> str:
    """Return the given separator, or the recognized one that divides the first line most.

    csv.Sniffer guesses from values, which may be texts.
    """
    if form.separator is not None:
        return form.separator
    first_line = re.match(r"[^\r\n]*", text)[0]  # type: ignore[index]  # which always matches
    columns = {}
    for mark in RECOGNIZED:
        names = next(csv.reader([first_line], delimiter=mark), [])
        columns[mark] = len(names)
    return max(columns, key=lambda mark: columns[mark])  # of equal ones the first


def other_separator(text: str, used: str) -> str | None:
    """Return the name of another mark that divides all of the first lines into equally many parts; None without one."""
    lines = text[:100_000].splitlines()[: EXAMINED_LINES + 1]
    lines = [line for line in lines if line][:EXAMINED_LINES]
    for name, mark in SEPARATORS.items():
        if mark == used:
            continue
        try:
            lengths = {len(parts) for parts in csv.reader(lines, delimiter=mark)}
        except csv.Error:
            continue
        fewest = 3 if mark in WORDS else 2
        if len(lengths) == 1 and min(lengths) >= fewest:
            return name
    return None


def advice_on_separator(text: str, used: str) -> str:
    """Return what to set if another mark seems to separate the columns, to be added to a message; "" if none does."""
    name = other_separator(text, used)
    if name is None:
        return ""
    return f"; its columns seem to be separated by {SEPARATORS[name]!r}: set separator={name}"
