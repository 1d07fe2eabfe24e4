"""Training, planning and export ask nothing of a network but the interface of a family."""

import copy
import threading
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from tabicl_train import register
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.model.config import family_of, settings_of
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.training.checks import check_network
from tabicl_train.training.loop import train
from tabicl_train.training.module import Gradients
from tabicl_train.training.planning import run_plan
from tabicl_train.training.state import untrained_module
from tabicl_train.weights.export import save_public
from tabicl_train.weights.files import read_safetensors
from tabicl_train.weights.hub_format import save_hub
from tabicl_train.weights.pretrained import Pretrained
from tabicl_train.weights.reader import load_network


@dataclass
class LineConfig:
    family: str = "line"
    max_classes: int = 0
    dropout: float = 0.0
    checkpoint_rows: int = 0
    is_regression: ClassVar[bool] = True
    missing_values: ClassVar[bool] = False
    outputs: ClassVar[int] = 1

    def problems(self) -> list[str]:
        return []


class Line(Network):
    """A network for float targets, without formulas of its costs: the mean of the labeled rows and a line."""

    parts = {"column": "slope", "icl": "intercept"}

    def __init__(self, config: LineConfig):
        super().__init__(config)
        self.config = config
        self.slope, self.intercept = nn.Linear(1, 1), nn.Linear(1, 1)

    @staticmethod
    def guess_loss(y: Tensor, train_size: int) -> float:
        return y[train_size:].var().item()

    @staticmethod
    def to_public(config: LineConfig) -> dict[str, Any]:
        return {"family": "line"}

    @staticmethod
    def pack_tokens(config: LineConfig, num_rows: int, num_features: int) -> int:
        return num_rows

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        lines = [self.slope(X[n:, :1]) + self.intercept(y[:n].mean()[None]) for X, y, n in pack.tables()]
        return torch.cat(lines)  # (query rows, 1)

    def row_losses(self, predictions: Tensor, pack: Pack) -> Tensor:
        return (predictions[:, 0] - pack.queries()).square()


@pytest.fixture
def line(monkeypatch, tmp_path):
    """A third family: a registered class, and a YAML file in the folder that is returned."""
    monkeypatch.setattr(register.network, "_entries", dict(register.network._entries))
    register.network("line", Line, settings=LineConfig)
    (tmp_path / "configs/model").mkdir(parents=True)
    file = "defaults:\n  - override /model/schema@_global_.model: line\n"
    (tmp_path / "configs/model/line.yaml").write_text(file)
    return str(tmp_path / "configs")


def test_another_family_is_chosen_trained_and_continued(line, tmp_path):
    short = [f"curriculum.stages.smoke.{value}" for value in ("steps=4", "rows=[12,20]", "features=[1,1]")]
    settings = [
        "experiment=smoke",
        "model=line",
        "prior=linear_functions",
        *short,
        "stream.num_workers=0",
        "trainer.log_every=1",
    ]
    config = compose([*settings, f"run_dir={tmp_path}/run", "trainer.accelerator=cpu"], config_dir=line)
    assert config.model == LineConfig()
    assert train(replace(config, trainer=replace(config.trainer, max_steps=2))) == train(config) == "finished"
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics["step"].max() == 4 and metrics["loss"].notna().all()
    assert metrics["tflops_per_s"].isna().all()
    assert isinstance(load_network(f"{tmp_path}/run"), Line)


def test_another_family_is_trained_planned_and_exported(line, tmp_path):
    smoke = compose(["experiment=smoke", "trainer.accelerator=cpu"])
    config = replace(smoke, model=LineConfig())
    module = untrained_module(config)
    stage = replace(config.curriculum.stages["smoke"], frozen=["column"])
    assert len(module.gradients_of(stage).parameters) == 2
    X = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))
    y = X[..., 0] * 2 + 0.5  # float targets reach the loss as they are
    pack = Pack.of((X[i], y[i], 12) for i in range(3))
    gradients = Gradients(list(module.model.parameters()), [])
    losses = module.add_gradients(gradients, pack, 1.0)
    predictions = module.model(pack).view(3, 8)
    assert torch.allclose(losses, ((predictions - y[:, 12:]) ** 2).mean(1))
    assert gradients.flat.abs().sum() > 0

    lines = run_plan(config)
    assert lines[0] == "model     4 parameters"
    assert lines[2].split().count("unknown") == 2  # FLOPs and memory
    for group in plan_step(config.curriculum, config.model, config.seed, 0).groups:
        assert group.table_cost == group.table_tokens == group.spec.num_rows

    save_public(config.model, module.model.state_dict(), tmp_path / "line.ckpt")
    content = torch.load(tmp_path / "line.ckpt", weights_only=True)
    assert content["config"] == {"family": "line"}
    assert content["state_dict"].keys() == dict(module.model.named_parameters()).keys()


class Keeping(Line):
    """Keeps its last predictions, and what the test gives it."""

    factor = 1.0

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        self.kept = [{"last": super().forward(pack)}]
        return self.kept[0]["last"] * self.factor


class Buffered(Line):
    """Keeps its last predictions in a buffer."""

    def __init__(self, config: LineConfig):
        super().__init__(config)
        self.register_buffer("last", None)

    def forward(self, pack: Pack, checkpoint_rows: int | None = None) -> Tensor:
        self.last = super().forward(pack)
        return self.last


@pytest.mark.parametrize("thing", [None, threading.Lock(), torch.Generator(), (i for i in range(3))])
def test_a_network_that_keeps_what_has_no_copy_is_copied_without_it(thing):
    network = Keeping(LineConfig()).eval().double()
    network.thing, network.factor = thing, 2.0  # an attribute that decides what it computes
    X = torch.randn(9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pack = Pack.of([(X, X[:, 0], 5)])
    expected = network(pack)
    before = torch.random.get_rng_state()
    twin, head = copy.deepcopy([network, network])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert twin is head and twin.slope is not network.slope and not twin.training
    assert torch.equal(twin(pack), expected)
    with torch.no_grad():
        twin.slope.weight.zero_()
    assert torch.equal(network(pack), expected)


@pytest.mark.parametrize("thing", [None, threading.Lock()])
def test_what_is_copied_beside_a_network_is_not_taken_for_a_part_of_it(thing):
    network = Keeping(LineConfig())
    network.thing = thing
    memo: dict = {}  # by id, of objects that it keeps alive
    twin = network.__deepcopy__(memo)
    assert memo.pop(id(network)) is twin
    kept = {id(thing) for thing in memo.pop(id(memo), [])} | {id(part) for part in network.modules()}
    kept |= {id(weight) for weight in network.parameters()}
    assert memo.keys() <= kept


def test_a_network_that_can_neither_be_copied_nor_built_is_named():
    network = Keeping(LineConfig())
    network.thing, network.intercept = threading.Lock(), nn.Linear(1, 2)  # other weights than those of its settings
    with pytest.raises(
        ConfigError, match=r"Keeping cannot be copied: .*lock.*; from settings and weights: .*intercept"
    ):
        copy.deepcopy(network)


def test_a_pass_that_changes_what_checkpoints_hold_is_refused():
    module = untrained_module(compose(["experiment=smoke", "trainer.accelerator=cpu"]))
    module.model = Buffered(LineConfig())
    (problem,) = check_network(module)
    assert problem.startswith("Buffered: a pass changes the shape of last in the state_dict")
    module.model = Line(LineConfig())
    module.model.register_buffer("matrix", torch.eye(2).to_sparse())
    (problem,) = check_network(module)
    assert problem.startswith("Line: 'matrix' in its state_dict is not a dense tensor")


def test_a_trained_parameter_that_is_not_float32_is_refused():
    module = untrained_module(compose(["experiment=smoke", "trainer.accelerator=cpu"]))
    module.model = Line(LineConfig())
    module.model.slope.double()
    (problem,) = check_network(module)
    assert problem.startswith("Line: slope.weight is torch.float64; parameters that are trained must be")


@dataclass
class IndexedConfig(LineConfig):
    num_quantiles: int = 1


class Indexed(Line):
    """Has a buffer of indices that float32 cannot hold."""

    def __init__(self, config: IndexedConfig):
        super().__init__(config)
        self.register_buffer("ids", torch.tensor([2**60 + 1]))


def test_a_buffer_of_integers_is_exported_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(register.network, "_entries", dict(register.network._entries))
    register.network("line", Indexed, settings=IndexedConfig)
    weights = Indexed(IndexedConfig()).state_dict()
    save_hub(Pretrained(IndexedConfig(), weights, {}), tmp_path / "hub", check=lambda path: None)
    save_public(IndexedConfig(), weights, tmp_path / "line.safetensors")
    assert torch.equal(load_network(tmp_path / "hub").ids, weights["ids"])
    assert torch.equal(read_safetensors(tmp_path / "line.safetensors")["state_dict"]["ids"], weights["ids"])


def test_an_unknown_family_is_refused_with_the_list_of_families():
    with pytest.raises(ConfigError, match="there is no network 'line'; there are tabicl, sequence"):
        settings_of({"family": "line"})
    with pytest.raises(
        ConfigError, match="LineConfig has the settings of no registered network; there are tabicl, sequence"
    ):
        family_of(LineConfig())


def test_tables_of_a_stage_must_fit_the_network():
    stages = {
        "short": StageConfig(rows=[10, 40], features=[1, 1]),
        "long": StageConfig(rows=[10, 300], features=[1, 1]),
    }
    (problem,) = CurriculumConfig(stages).unsupported(SequenceConfig())
    assert problem.startswith("stages.long.rows is [10, 300]; ")
