"""The speedrun: its test and its rules, the page that states them, and the command from start to end."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import command
from scipy import stats

from tabicl_train import speedrun
from tabicl_train.config.options import SpeedrunOptions
from tabicl_train.config.schema import RunConfig
from tabicl_train.run_dir.records import Records

PAGE = Path(__file__).resolve().parents[2] / "configs/experiment/SPEEDRUN.md"
GOOD = [0.787, 0.788, 0.786, 0.787, 0.789]
TIMES = [(300.0, 600.0), (310.0, 590.0), (290.0, 610.0), (305.0, 600.0), (300.0, 605.0)]


def result_of(scores=GOOD, pairs=TIMES, trial=()) -> dict:
    return {"trial": trial, **speedrun.judge(scores, 0.7845, pairs)}


def test_scores_are_tested_and_times_are_compared_by_closed_forms():
    judged = speedrun.judge(GOOD, 0.7845, TIMES)
    mean = sum(GOOD) / 5
    error = math.sqrt(sum((score - mean) ** 2 for score in GOOD) / 4 / 5)
    assert judged["p"] == pytest.approx(stats.t.sf((mean - 0.7845) / error, 4))
    assert judged["ratio"][0] == pytest.approx(math.prod(entry / reference for entry, reference in TIMES) ** (1 / 5))
    assert judged["ratio"][1] < judged["ratio"][0] < judged["ratio"][2] < 0.6
    assert speedrun.target_of([1.0, 2.0, 3.0]) == pytest.approx(0.0)
    assert speedrun.judge([0.8] * 5, 0.7845, TIMES)["p"] == 0 and speedrun.judge([0.7] * 5, 0.7845, TIMES)["p"] == 1


def test_what_a_result_is():
    assert speedrun.verdict(result_of()).startswith("a candidate for a record")
    assert "did not help" in speedrun.verdict(result_of([score - 0.002 for score in GOOD]))
    assert "not all runs were timed" in speedrun.verdict(result_of(pairs=[(None, 600.0), *TIMES[1:]]))
    slightly_faster = [(0.98 * reference, reference) for _, reference in TIMES]
    noisy = [(300.0, 600.0), (840.0, 600.0), (360.0, 600.0), (780.0, 600.0), (420.0, 600.0)]
    for pairs in (slightly_faster, noisy):
        assert "at most 0.97" in speedrun.verdict(result_of(pairs=pairs))
    trial = speedrun.verdict(result_of(trial=["suites is ['sklearn']"]))
    assert "a trial" in trial and trial.endswith("the target is reached, and its time is that of a record")
    lucky = speedrun.Plan(SpeedrunOptions(seeds=[0, 1, 2, 3, 7]), [], [], None, RunConfig())
    assert lucky.trial == ["the seeds are 0, 1, 2, 3, 7"]
    assert not lucky.other_scores  # so a repeat with other seeds is tested by the fixed target
    small = speedrun.Plan(SpeedrunOptions(suites=["sklearn"]), [], [], None, RunConfig())
    assert small.other_scores == small.trial == ["suites is ['sklearn']"]


def test_runs_between_which_something_changed_are_no_entry(tmp_path):
    plan = speedrun.Plan(SpeedrunOptions(run_dir=str(tmp_path), seeds=[0, 1]), [], [], None, RunConfig())
    start = {"commit": "a", "diff": "", "versions": {"torch": "2"}, "machines": [{"host": "here", "cpu": "x"}]}
    for seed, arms in plan.order:
        for arm in arms:
            plan.run_dir(arm, seed).mkdir()
            records = Records(plan.run_dir(arm, seed))
            records.append_line("provenance.jsonl", start)
            records.replace("status.json", json.dumps({"status": "finished", "step": plan.entry.total_steps}))
            records.replace("config.yaml", f"seed: {seed}\nrun_dir: {arm}-{seed}\noptimizer: {{momentum: 0.9}}\n")
    assert speedrun.differences(plan) == []
    records.append_line("provenance.jsonl", start | {"diff": "+", "machines": [{"host": "there", "cpu": "x"}]})
    records.replace("config.yaml", "optimizer: {momentum: 0.8}\n")
    records.replace("status.json", json.dumps({"status": "finished", "step": 7}))
    code, uncommitted, machines, steps, settings = speedrun.differences(plan)
    assert "the code was" in code and "not committed" in uncommitted
    assert "seed 1 are from several machines" in machines
    assert steps.startswith("the run of seed 1 ended after 7 of ")
    assert settings == "settings of the entry were changed between the runs"  # seed 1 trains the entry last


def test_times_are_compared_of_pairs_on_two_cores_without_a_break(tmp_path):
    plan = speedrun.Plan(SpeedrunOptions(run_dir=str(tmp_path), seeds=[0, 1]), [], [], None, RunConfig())

    def add(arm: str, seed: int, minutes: int, cpu: float) -> None:
        plan.run_dir(arm, seed).mkdir(exist_ok=True)
        records = Records(plan.run_dir(arm, seed))
        records.replace("provenance.jsonl", json.dumps({"time": f"2026-11-27T08:{minutes:02}:00+0000"}) + "\n")
        records.replace("seconds.json", json.dumps({"seconds": 300.0, "cpu": cpu}))

    add("reference", 1, 0, 590.0)  # seed 1 trains the reference first
    add("entry", 1, 14, 590.0)
    assert speedrun.untimely(plan, 1) == []
    add("entry", 1, 16, 900.0)
    assert speedrun.untimely(plan, 1) == [
        "the entry of seed 1 kept 3.00 cores busy",
        "the runs of seed 1 are 11 min apart",
    ]


def test_the_reference_runs_without_the_plugins_of_an_entry(monkeypatch):
    monkeypatch.setattr(speedrun.plugins, "arguments", lambda hashes=True: ["plugins=[slow.py]"])
    of_rules = speedrun.Plan(SpeedrunOptions(), [], ["prior=mlp_scm"], None, RunConfig())
    trained = {}
    for line in of_rules.text().splitlines():
        trained["experiment=demo_long" in line] = "plugins=" in line
    assert trained == {True: False, False: True}
    assert replace(of_rules, options=SpeedrunOptions(reference="mine")).plugins("reference") == ["plugins=[slow.py]"]


def test_rules_that_a_configuration_breaks():
    plain = RunConfig(prior={"name": "mlp_scm"})
    assert speedrun.broken_rules(plain) == []
    broken = [
        (replace(plain, init_weights="mini"), "from nothing"),
        (replace(plain, prior={"name": "disk", "folder": "tables"}), "while the clock runs"),
        (replace(plain, prior={"name": "mix_scm", "components": {"tables": {"folder": "mine"}}}), "no real ones"),
        (replace(plain, trainer=replace(plain.trainer, max_hours=0.1)), "does not depend on time"),
        (replace(plain, trainer=replace(plain.trainer, accelerator="cuda")), "2 CPU cores"),
        (replace(plain, trainer=replace(plain.trainer, devices=3)), "2 CPU cores"),
        (replace(plain, stream=replace(plain.stream, num_workers=3)), "2 CPU cores"),
        (replace(plain, stream=replace(plain.stream, name="ray", num_workers=1)), "same 2 cores"),
        (replace(plain, model=replace(plain.model, max_classes=0)), "does not predict classes"),
    ]
    for config, reason in broken:
        (line,) = speedrun.broken_rules(config)
        assert reason in line, line


def test_the_page_states_what_the_command_does():
    page = " ".join(PAGE.read_text().split())
    scores = [f"{score:.4f}" for score in speedrun.REFERENCE_SCORES]
    assert f"| `demo_long` | {' | '.join(scores)} |" in page
    assert f"**The target is {speedrun.target_of(speedrun.REFERENCE_SCORES):.4f}**" in page
    assert len(speedrun.REFERENCE_SCORES) == speedrun.SEEDS
    records = PAGE.read_text().partition("## Records")[2].partition("\n## ")[0]
    last = [line for line in records.splitlines() if line.startswith("| 20")][-1]
    assert float(last.split("|")[6].split()[0]) == speedrun.RECORD
    assert f"p < {speedrun.LEVEL}" in page and f"at least {speedrun.LEAST_SAVING * 100:.0f} % below" in page


@pytest.mark.slow
def test_the_command_from_start_to_end(tmp_path):
    arguments = ["experiment=smoke", "reference=smoke", "seeds=[0,1]", "suites=[sklearn]", "splits=1", "rows=100"]
    arguments += ["trainer.max_steps=4", f"run_dir={tmp_path / 'a run'}"]
    first = command("speedrun", *arguments)
    assert first.returncode == 0, first.stderr
    written = json.loads((tmp_path / "a run/speedrun.json").read_text())
    assert written["ratio"][0] > 0 and [row["seed"] for row in written["seeds"]] == [0, 1]
    assert "a trial, no entry" in first.stdout and (tmp_path / "a run/speedrun.md").read_text() == first.stdout
    runs = {"entry-0", "entry-1", "entry-warm-up", "reference-0", "reference-1", "reference-warm-up"}
    assert runs <= {path.name for path in (tmp_path / "a run").iterdir()}
    assert Records(tmp_path / "a run/entry-1").config()["validation"]["every"] == 0

    again = command("speedrun", *arguments)
    assert again.stdout == first.stdout and "train  " not in again.stderr

    # What is left of an interrupted run: it continues, and has no time.
    shutil.rmtree(tmp_path / "a run/entry-1")
    (tmp_path / "a run/entry-1").mkdir()
    interrupted = command("speedrun", *arguments)
    assert "remove entry-1 reference-1" in interrupted.stdout, interrupted.stderr

    (tmp_path / "a run/plan.json").rename(tmp_path / "plan.json")
    adopted = command("speedrun", *arguments)
    assert adopted.returncode == 2 and "without its plan.json" in adopted.stderr
    (tmp_path / "plan.json").rename(tmp_path / "a run/plan.json")
    other = command("speedrun", *arguments, "optimizer.momentum=0.8")
    assert other.returncode == 2 and "holds another speedrun" in other.stderr
    refused = command("speedrun", "experiment=smoke", "init_weights=mini", "n_estimators=4", "seed=1")
    assert refused.returncode == 2 and refused.stderr.count("error:") == 3
