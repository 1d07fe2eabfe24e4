"""Tables as text, and lines beside a progress bar."""

import errno
import io
import sys

import pytest
from tqdm import tqdm

from tabicl_train.console import info, markdown_table, one_line, print_above_bar, text_table


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table(["name", "n"], [["a", "1,000"], ["long name", 2]]).splitlines() == [
        "name           n",
        "a          1,000",
        "long name      2",
    ]
    assert markdown_table(["a", "b"], [["x|y", 1]]).splitlines() == ["| a | b |", "| --- | --- |", r"| x\|y | 1 |"]


@pytest.mark.parametrize("control", ["\n", "\r", "\t", "\x1b[2J", "\x9b", "\x7f", "\x85", "\u2028", "\u202e", "\u2066"])
def test_what_is_printed_has_no_control_characters(capsys, control):
    text = f"name{control}of a column, caf\u00e9 \u4e2d"
    info(text)
    assert capsys.readouterr().err == repr(text)[1:-1] + "\n" == one_line(text) + "\n"
    first, second = text_table(["name", "n"], [[text, 1]]).split("\n")
    assert len(first) == len(second) and one_line(second) == second


def test_a_line_stands_above_the_progress_bar(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with tqdm(total=2, file=sys.stderr):
        print_above_bar("a note")
    assert "a note" in stderr.getvalue().replace("\r", "\n").splitlines()


def test_a_closed_terminal_ends_no_loop_with_a_bar(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    for _ in tqdm([1], file=sys.stderr):
        print_above_bar("a note")
