"""Files of a run are no outputs: no command replaces one, or adds one to its folders."""

import pytest
from command_line import command
from table_files import build_frame
from training_runs import write_untrained_run

from tabicl_train.outputs import make_folder, output_problems, owner_problem

OUTPUTS = [  # of a command, which is ready to write
    ("export", "checkpoint=mini", "output=RUN/checkpoints/step-00000010.ckpt"),
    ("export", "checkpoint=mini", "output=RUN/checkpoints/new.onnx"),
    ("export", "checkpoint=mini", "output=RUN/checkpoints/hub"),
    ("export", "checkpoint=mini", "output=RUN/tensorboard"),
    ("export", "checkpoint=mini", "output=link/best.ckpt"),
    ("report", "run_dir=RUN", "output=RUN/checkpoints/step-00000010.ckpt", "overwrite=true"),
    ("report", "run_dir=RUN", "output=RUN/wandb.json"),
    ("predict", "train=t.csv", "test=t.csv", "target=size", "output=RUN/validation.csv", "overwrite=true"),
    ("predict", "train=t.csv", "test=t.csv", "target=size", "output=RUN/metrics.csv"),
    ("evaluate", "checkpoint=mini", "output=RUN/validation.csv", "overwrite=true"),
    ("evaluate", "checkpoint=mini", "output=linked.csv", "overwrite=true"),
    ("evaluate", "checkpoint=mini", "figure=RUN/checkpoints/best.png"),
    ("compare", "scores.csv", "output=RUN/checkpoints"),
    ("gpu_check", "output=RUN/profile"),
    ("prior", "gallery", "experiment=smoke", "prior=dummy", "output=RUN/checkpoints/tables.png"),
    ("prior", "dump", "experiment=smoke", "prior=dummy", "output=RUN/checkpoints/tables", "steps=10"),
    ("prior", "dump", "experiment=smoke", "prior=dummy", "output=RUN/lock", "format=file"),
    ("lab", "fading", "folder=RUN/jobs/lab"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    write_untrained_run(folder / "RUN")
    (folder / "RUN/config.yaml").write_text("{}")
    (folder / "link").symlink_to("RUN/checkpoints")
    (folder / "linked.csv").symlink_to("RUN/scaling.csv")
    build_frame(0, 60).to_csv(folder / "t.csv", index=False)
    scores = [f"{task},0,{method},0.{place}" for task in "abc" for place, method in enumerate(("m", "n"), 5)]
    (folder / "scores.csv").write_text(
        "\n".join(["data,split,method,roc_auc,log_loss", *(f"{row},1" for row in scores)])
    )
    return folder


@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_no_command_writes_a_file_of_a_run(words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    result = command(*words)
    assert result.returncode == 2, result.stderr
    assert "belongs to the run or sweep in " in result.stderr.splitlines()[-1]
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


def test_what_belongs_to_a_run_and_what_does_not(folder, tmp_path):
    run = folder / "RUN"
    (run / "mine.csv").write_text("step,loss\n")  # of a callback
    for name in ("rank-3.log", "new.jsonl", "mine.csv", "wandb/a/b", "profile/x.json", "test.json", "config.yaml"):
        assert owner_problem(run / name) is not None, name
    for name in ("report.html", "evaluation.csv", "model.ckpt", "hub", "sub/metrics.csv", "predictions.csv"):
        assert output_problems("output", run / name) == [], name
    make_folder("output", run)
    (tmp_path / "study.log").touch()
    assert all(owner_problem(tmp_path / name) for name in ("study.log", "results.csv", "sweep.html"))
    assert not owner_problem(tmp_path / "comparison.csv")
    assert not owner_problem(tmp_path / "other/checkpoints/a.ckpt")
