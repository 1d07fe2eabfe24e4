"""The launch scripts with stand-ins for Python, srun and scontrol, which record how they are called.

Most of these tests are slow ones, as scripts are seldom changed.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = ["experiment=smoke", "seed=3"]
# Checks a configuration, as tabicl-train does with --cfg job.
PYTHON = """#!/usr/bin/env bash
[[ "${PYTHONSAFEPATH-}" = 1 || "$1" = -P* ]] || { echo "imports from the current folder" >&2; exit 9; }
case "$*" in
*"-m pip "*) echo "$*" >> installed ;;
*"-c import priors."*) echo "$*" >> compiled ;;
*--cfg*) [[ "$*" != *wrong* ]] || { echo "error: wrong" >&2; exit 2; } ;;
*) echo "$*" >> calls ;;
esac
"""
RECORD = '#!/usr/bin/env bash\necho "$*" >> calls\n'
SRUN = RECORD.replace("echo", '[ "$PYTHONSAFEPATH" = 1 ] && echo')
SCONTROL = "#!/usr/bin/env bash\nprintf 'first\\nsecond\\n'\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's folder, beside a project whose environment is made of the stand-ins."""
    project, user = tmp_path / "the project", tmp_path / "user"
    programs = project / ".venv/bin"
    programs.mkdir(parents=True)
    shutil.copytree(ROOT / "launch", project / "launch")
    shutil.copy(ROOT / "pyproject.toml", project)
    (programs / "activate").write_text(f"PATH='{programs}':$PATH\n")
    for name, text in {"python": PYTHON, "srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    user.mkdir()
    monkeypatch.chdir(user)
    return user


def multinode(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", "../the project/launch/multinode.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def sbatch(folder: Path, *settings: str, **variables: str) -> subprocess.CompletedProcess:
    """What SLURM does with launch/slurm.sbatch."""
    job = {"SLURM_JOB_ID": "16", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "first,second"}
    project = folder.parent / "the project"
    path = f"{project}/.venv/bin:{os.environ['PATH']}"
    env = os.environ | job | {"SLURM_SUBMIT_DIR": str(folder), "PATH": path} | variables
    command = ["bash", project / "launch/slurm.sbatch", *settings]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def called(folder: Path) -> str:
    """The last call that was recorded, if any."""
    calls = folder / "calls"
    return calls.read_text().splitlines()[-1] if calls.exists() else ""


def test_machines_meet_with_the_same_settings(folder):
    assert multinode(folder, "a:1", "1:4", "2", *SETTINGS).returncode == 0
    first = called(folder)
    assert first.startswith("-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint a:1 --rdzv-id tabicl-")
    assert "--nnodes 1:4 --nproc-per-node 2 --max-restarts 10 " in first
    assert first.endswith(" -m tabicl_train " + " ".join(SETTINGS))
    multinode(folder, "a:1", "1:4", "2", *SETTINGS)
    assert called(folder) == first
    multinode(folder, "a:1", "1:4", "2", "experiment=smoke", "seed=4")
    ids = [line.partition("--rdzv-id ")[2].split()[0] for line in (first, called(folder))]
    assert ids[0] != ids[1]


@pytest.mark.slow
def test_other_machines_do_not_reach_a_single_one(folder):
    loopback = "-m tabicl_train.training.distributed.loopback --rdzv-backend loopback "
    assert multinode(folder, "a:1", "1", "2", *SETTINGS).returncode == 0
    assert called(folder).startswith(loopback)
    assert " --nnodes 1 --nproc-per-node 2 " in called(folder)
    assert sbatch(folder, *SETTINGS, SLURM_NNODES="1").returncode == 0
    assert f" python {loopback}" in called(folder)
    assert " --nnodes 1 " in called(folder)


@pytest.mark.parametrize(
    "arguments",
    [["a:1", "2", "2"], ["a:1", "2", "seed=1"], ["a:1", "two", "2", "seed=1"], ["a:1", "2", "2", "wrong=1"]],
)
def test_wrong_arguments_start_no_torchrun(arguments, folder):
    result = multinode(folder, *arguments)
    assert result.returncode == 2
    assert "usage: " in result.stderr or "error: wrong" in result.stderr
    assert not called(folder)


@pytest.mark.slow
def test_a_script_installs_once_and_stays_in_the_folder_of_the_user(folder):
    first, second = (multinode(folder, "a:1", "2", "2", *SETTINGS).stderr for _ in range(2))
    project = folder.parent / "the project"
    assert f"into {project}/.venv; 2 to 8 GB, a few minutes" in first
    assert "into" not in second
    (installed,) = (folder / "installed").read_text().splitlines()
    assert installed.endswith(f"-c {project}/launch/constraints.txt -e {project}")
    assert {path.name for path in folder.iterdir()} == {"installed", "compiled", "calls"}


@pytest.mark.slow
def test_a_job_starts_one_torchrun_on_each_node(folder):
    """SLURM sends SIGUSR1 before the time limit, starts the job again, and appends to its log."""
    options = [line for line in (ROOT / "launch/slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    wanted = ("--ntasks-per-node=1", "--requeue", "--open-mode=append", "--signal=USR1@300")
    assert {f"#SBATCH {option}" for option in wanted} <= set(options)
    assert sbatch(folder, *SETTINGS, SLURM_GPUS_ON_NODE="8").returncode == 0
    for part in ("--nnodes 2 --nproc-per-node 8 ", "--rdzv-endpoint first:15016 --rdzv-id 16 ", ",SIGUSR2,SIGXCPU "):
        assert part in called(folder)
    assert called(folder).endswith(" -m tabicl_train trainer.requeue=true " + " ".join(SETTINGS))
    sbatch(folder, *SETTINGS, RANKS="4")
    assert "--nproc-per-node 4 " in called(folder)


@pytest.mark.slow
def test_the_index_in_an_array_chooses_the_seed_or_a_line_of_settings(folder):
    (folder / "settings").write_text("seed=9\noptimizer=adamw optimizer.eps=1e-7\n")
    assert sbatch(folder, "seed=%a", "run_dir=seed-%a", SLURM_ARRAY_TASK_ID="3").returncode == 0
    assert called(folder).endswith(" seed=3 run_dir=seed-3")
    assert sbatch(folder, "@settings", "run_dir=line-%a", SLURM_ARRAY_TASK_ID="1").returncode == 0
    assert called(folder).endswith(" optimizer=adamw optimizer.eps=1e-7 run_dir=line-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "index", "message"),
    [("@settings", {"SLURM_ARRAY_TASK_ID": "1"}, "no line 1"), ("@settings", {}, "needs a job array"),
     ("seed=%a", {}, "needs a job array"), ("@missing", {"SLURM_ARRAY_TASK_ID": "0"}, "missing"),
     ("wrong=1", {}, "error: wrong")],
)  # fmt: skip
def test_a_job_with_wrong_settings_trains_nothing(setting, index, message, folder):
    (folder / "settings").write_text("seed=9\n")
    result = sbatch(folder, setting, "run_dir=run", **index)
    assert result.returncode != 0
    assert message in result.stderr
    assert not called(folder)


@pytest.mark.slow
def test_a_job_without_settings_does_not_train_the_default(folder):
    result = sbatch(folder)
    assert result.returncode == 2
    assert "there are no settings" in result.stderr
    assert not called(folder)


@pytest.mark.slow
def test_each_of_the_weights_gets_a_hub_folder_of_its_name(folder):
    project = folder.parent / "the project"
    (project / "tabicl_train/weights").mkdir(parents=True)
    for name in ("a-2027-01-classifier", "a-2027-01-regressor"):
        (project / f"tabicl_train/weights/{name}.safetensors").touch()
    export = project / ".venv/bin/tabicl-export"
    export.write_text(RECORD)
    export.chmod(0o755)
    assert subprocess.run(["bash", project / "launch/hub.sh", "my hub"], capture_output=True).returncode == 0
    assert (folder / "calls").read_text().splitlines() == [
        "checkpoint=a-2027-01-classifier output=my hub/a-2027-01-classifier",
        "checkpoint=a-2027-01-regressor output=my hub/a-2027-01-regressor",
    ]


@pytest.mark.slow
def test_an_extra_is_installed_where_another_one_is(folder):
    project = folder.parent / "the project"
    for extra in ("test", "docs", "docs", ""):
        setup = f'. "{project}/launch/setup.sh" {extra}'
        assert subprocess.run(["bash", "-c", setup], capture_output=True).returncode == 0
    installed = (folder / "installed").read_text().splitlines()
    assert [line.rpartition("-e ")[2] for line in installed] == [f"{project}[test]", f"{project}[docs]"]
    assert "priors.graph.nodes" in (folder / "compiled").read_text()


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.s*")), ids=lambda path: path.name)
def test_a_script_is_bash(script):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr
