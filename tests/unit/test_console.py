"""Tables as text."""

from tabicl_train.console import markdown_table, text_table


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table(["name", "n"], [["a", "1,000"], ["long name", 2]]).splitlines() == [
        "name           n",
        "a          1,000",
        "long name      2",
    ]
    assert markdown_table(["a", "b"], [["x|y", 1]]).splitlines() == ["| a | b |", "| --- | --- |", r"| x\|y | 1 |"]
