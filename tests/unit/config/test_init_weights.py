import dataclasses

import pytest
import torch

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import export
from tabicl_train.prediction.hub_format import save_hub
from tabicl_train.prediction.origin import Pretrained
from tabicl_train.resume import initial_weights
from tabicl_train.state import untrained_module


def test_a_run_starts_from_a_run_a_checkpoint_a_public_file_or_a_hub_folder(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    config = compose(["experiment=smoke"])
    for step in 2, 3:
        torch.manual_seed(step)
        content = {
            "global_step": step,
            "config": dataclasses.asdict(config),
            "state_dict": untrained_module(config).state_dict(),
        }
        torch.save(content, tmp_path / f"run/checkpoints/step-0000000{step}.ckpt")
    export(str(tmp_path / "run"), str(tmp_path / "public.ckpt"))
    export(str(tmp_path / "run"), str(tmp_path / "hub"))
    for start, step in ("run", 3), ("run/checkpoints/step-00000002.ckpt", 2), ("public.ckpt", 3), ("hub", 3):
        config = compose(["experiment=smoke", f"init_weights={tmp_path}/{start}"])
        weights = initial_weights(config.init_weights, config.model).tensors
        saved = torch.load(tmp_path / f"run/checkpoints/step-0000000{step}.ckpt")["state_dict"]
        assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in weights.items())
        assert len(weights) == len(saved)
    (tmp_path / "empty").mkdir()
    config = compose(["experiment=smoke", f"init_weights={tmp_path}/empty"])
    with pytest.raises(ConfigError, match=r"init_weights: .*holds no checkpoint of a run"):
        initial_weights(config.init_weights, config.model)
    # a network that sees missing values begins as one that does not, but not the other way round
    config = compose(["experiment=smoke", "model.missing_values=true", f"init_weights={tmp_path}/run"])
    weights = initial_weights(config.init_weights, config.model).tensors
    assert weights.pop("col_embedder.missing_values").count_nonzero() == 0
    saved = torch.load(tmp_path / "run/checkpoints/step-00000003.ckpt")["state_dict"]
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in weights.items())
    assert len(weights) == len(saved)
    weights = initial_weights(config.init_weights, config.model).tensors
    save_hub(Pretrained(config.model, weights), tmp_path / "seeing", lambda _: None)
    config = compose(["experiment=smoke", f"init_weights={tmp_path}/seeing"])
    with pytest.raises(ConfigError, match=r"than the configuration's; set model\.missing_values=True$"):
        initial_weights(config.init_weights, config.model)
    small = compose(["experiment=smoke", "model=small", f"init_weights={tmp_path}/run"])
    with pytest.raises(ConfigError, match=r"than the configuration's; set model=tiny$"):
        initial_weights(small.init_weights, small.model)
    # a run that has begun needs its start no more
    assert compose(["experiment=smoke", "init_weights=gone.ckpt", f"run_dir={tmp_path}/run"])
