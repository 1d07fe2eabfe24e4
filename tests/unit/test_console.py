"""Tables as text, and lines beside a progress bar."""

import errno
import io
import sys

from tqdm import tqdm

from tabicl_train.console import markdown_table, print_above_bar, text_table


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table(["name", "n"], [["a", "1,000"], ["long name", 2]]).splitlines() == [
        "name           n",
        "a          1,000",
        "long name      2",
    ]
    assert markdown_table(["a", "b"], [["x|y", 1]]).splitlines() == ["| a | b |", "| --- | --- |", r"| x\|y | 1 |"]


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
