"""What is recorded of a start, and what is told when tables may differ from those of the start before."""

import json

import torch

from tabicl_train.run.provenance import describe_machine, record_start
from tabicl_train.run.records import Records

ORIGIN = {"versions": {"torch": "2.13", "numpy": "2.4", "scipy": "1.17", "numba": "0.68", "lightning": "2.6"}}
HERE = {"host": "a", "cpu": "Xeon (AVX512)", "gpu": "H200"}
THERE = {"host": "b", "cpu": "EPYC (AVX2)", "gpu": "H200"}


def starts(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "provenance.jsonl").read_text().splitlines()]


def test_a_start_on_another_cpu_or_with_other_versions_is_told_once(tmp_path, capsys):
    def told(step: int, *ranks: dict, **versions: str) -> str:
        origin = {"versions": ORIGIN["versions"] | versions}
        record_start(Records(tmp_path), step, origin, list(ranks))
        return capsys.readouterr().err

    assert told(0, HERE, HERE) == ""
    assert told(8, HERE) == ""  # fewer ranks draw the same tables
    assert told(8, HERE, lightning="2.7") == ""  # draws none
    line = told(16, THERE, numpy="2.5")
    assert line.startswith("changed   numpy was 2.4, is 2.5; the CPU was Xeon (AVX512), is EPYC (AVX2): ")
    assert len(line.splitlines()) == 1
    assert told(24, THERE, numpy="2.5") == ""
    assert told(0, HERE) == ""  # from the first step on, with tables of its own
    assert [(start["step"], start["machines"][0]["cpu"]) for start in starts(tmp_path)][-1] == (0, "Xeon (AVX512)")


def test_several_kinds_of_cpu_give_one_warning_and_ranks_are_grouped(tmp_path, capsys):
    record_start(Records(tmp_path), 0, ORIGIN, [HERE, HERE, THERE])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning   ")
    assert line.endswith("Xeon (AVX512) (rank 0, 1); EPYC (AVX2) (rank 2)")
    assert starts(tmp_path)[0]["machines"] == [HERE | {"ranks": [0, 1]}, THERE | {"ranks": [2]}]


def test_a_machine_is_described_by_the_instructions_in_use():
    described = describe_machine(torch.device("cpu"))
    assert torch.backends.cpu.get_cpu_capability() in described["cpu"]
    assert described["host"] and described["gpu"] is None
