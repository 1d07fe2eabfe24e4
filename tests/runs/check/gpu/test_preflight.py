"""The preflight: what it says when all is well, and that it notices when something is not."""

import math
import shutil

import pytest
import torch
from training_runs import SHORT_RUN, read_metrics, train_short_run

from tabicl_train.check.gpu import preflight as checks
from tabicl_train.check.gpu.place import CheckFailed, CheckSkipped, Place
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.training import module

BF16 = [*SHORT_RUN, "trainer.precision=bf16", "trainer.max_steps=7"]
QUERY_LOSSES = module.query_losses


def preflight(folder, *settings):
    """Run the check; return its rows."""
    rows = []
    checks.preflight(Place(torch.device("cpu"), folder, rows.append), settings)
    return rows


def test_fp32_has_nothing_to_compare(tmp_path):
    with pytest.raises(CheckSkipped, match="nothing to compare"):
        preflight(tmp_path, *SHORT_RUN)


def test_a_preflight_takes_the_steps_of_a_run_in_both_precisions_and_writes_nothing(tmp_path):
    """In fp32 to the bit, although both begin with the momenta of the same checkpoint."""
    for steps in (4, 7):
        train_short_run(tmp_path / "whole", f"trainer.max_steps={steps}")
        if steps == 4:
            shutil.copytree(tmp_path / "whole", tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    rows = preflight(tmp_path, *BF16, f"run_dir={tmp_path}/run")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    whole = [(float(row["loss"]), float(row["grad_norm"])) for row in read_metrics(tmp_path / "whole")]
    exact, mixed = ([(row[f"loss, {name}"], row[f"norm, {name}"]) for row in rows] for name in ("fp32", "bf16"))
    assert [row["step"] for row in rows] == [4, 5, 6] and exact == whole[4:]
    for a, b in zip(exact, mixed, strict=True):
        assert b == pytest.approx(a, rel=0.05) and b != a
    with pytest.raises(ConfigError, match="the run is finished, so no steps are left"):
        preflight(tmp_path, *BF16, f"run_dir={tmp_path}/whole")
    with pytest.raises(ConfigError, match=r"is another run: model\.embed_dim was 16, is 8"):
        preflight(tmp_path, *BF16, f"run_dir={tmp_path}/run", "model.embed_dim=8")


def test_a_preflight_continues_what_a_run_continues(tmp_path):
    """Also a run of 0.2.0, whose file names a removed setting that had no effect."""
    train_short_run(tmp_path / "run", "trainer.max_steps=4")
    path = tmp_path / "run/checkpoints/step-00000004.ckpt"
    content = torch.load(path, weights_only=True)
    content["config"]["model"]["missing_values"] = False
    torch.save(content, path)
    config = compose([*SHORT_RUN, f"run_dir={tmp_path}/run"])
    assert checks.newest_content(config, configured_prior(config.prior))["global_step"] == 4


@pytest.mark.parametrize(("factor", "words"), [(1.2, "the loss is .* in bf16 and"), (math.nan, "bf16 gives loss nan")])
def test_deviations_from_fp32_are_refused(factor, words, monkeypatch, tmp_path):
    def worse_in_bf16(*arguments):
        return QUERY_LOSSES(*arguments) * (factor if torch.is_autocast_enabled("cpu") else 1.0)

    monkeypatch.setattr(module, "query_losses", worse_in_bf16)
    with pytest.raises(CheckFailed, match=words):
        preflight(tmp_path, *BF16, "trainer.max_steps=3", f"run_dir={tmp_path}/run")


def test_each_difference_has_its_limit():
    reference = [checks.Measured(2.0, 1.0, 5.0)] * 10
    assert checks.problems_against_fp32(reference, [checks.Measured(2.03, 1.2, 5.5)] * 10, "bf16") == []
    for mixed, words in (
        ([checks.Measured(2.0, 1.0, 5.0)] * 9 + [checks.Measured(2.0, 1.0, 7.0)], "largest multiplier is 7 in bf16"),
        ([checks.Measured(2.0, 0.7, 5.0)] * 10, "gradient norm is 0.7 in bf16"),
        ([checks.Measured(2.06, 1.0, 5.0)] * 10, "the loss is 2.0600 in bf16"),
    ):
        (problem,) = checks.problems_against_fp32(reference, mixed, "bf16")
        assert words in problem
    overflow = [checks.Measured(2.0, math.inf, 5.0)] * 2 + reference[2:]
    assert checks.problems_against_fp32(reference, overflow, "fp16") == []
    (problem,) = checks.problems_against_fp32(reference, overflow, "bf16")
    assert "gradient norm inf in step 0 of the preflight" in problem
