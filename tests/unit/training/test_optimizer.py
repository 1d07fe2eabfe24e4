import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import OptimizerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.training.optimizer import MuonAdamW, build_optimizer, optimizer_remarks, orthogonalize
from tabicl_train.training.state import untrained_module


def tiny_model() -> TabICL:
    torch.manual_seed(0)
    return TabICL(
        TabICLConfig(
            embed_dim=16, col_num_blocks=1, col_num_inducing=4, row_num_blocks=1, row_num_cls=2, icl_num_blocks=1
        )
    )


def test_orthogonalize_moves_singular_values_to_one_and_keeps_directions():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 20), (2, 8, 20), (1, 12, 12)):
        X = torch.randn(shape, generator=generator)
        result = orthogonalize(X)
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        inside = U.mT @ result @ Vh.mT  # diagonal where the singular vectors are kept
        values = inside.diagonal(dim1=1, dim2=2)
        assert ((values > 0.3) & (values < 1.3)).all()  # the quintic ends around 1, less for tiny singular values
        assert (inside - torch.diag_embed(values)).abs().max() < 1e-4
        assert result.dtype == X.dtype


def test_adamw_agrees_with_torch():
    torch.manual_seed(1)
    ours, reference = nn.Linear(5, 7).double(), nn.Linear(5, 7).double()
    reference.load_state_dict(ours.state_dict())
    group = {"params": list(ours.parameters()), "kind": "adamw", "lr": 0.01, "weight_decay": 0.1}
    a = MuonAdamW([group], betas=(0.8, 0.97), eps=1e-6)
    b = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.1)
    for step in range(7):
        X = torch.randn(11, 5, dtype=torch.float64)
        for model, optimizer in ((ours, a), (reference, b)):
            optimizer.zero_grad()
            (model(X).pow(2).sum() * (1 + step)).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_parameters_unfrozen_at_different_steps_have_bias_corrections_of_their_own():
    torch.manual_seed(1)
    ours = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(()))]
    reference = [nn.Parameter(p.detach().double()) for p in ours]
    a = MuonAdamW([{"params": ours, "kind": "adamw", "lr": 0.01, "weight_decay": 0.1}])
    b = torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    # Frozen: the first parameter until step 30, the second one after step 20, the third one for a while.
    trained = [{1, 2} if step < 10 else {1} if step < 20 else {2} if step < 30 else {0, 2} for step in range(40)]
    for step, numbers in enumerate(trained):
        counts = step not in (30, 33)  # the first step of a parameter does not count, nor does a later one
        for i, (p, q) in enumerate(zip(ours, reference, strict=True)):
            gradient = torch.randn_like(p) if i in numbers else None
            p.grad = gradient if counts or gradient is None else torch.zeros_like(p)
            q.grad = None if gradient is None else gradient.double()
        a.step(taken=torch.tensor(counts))
        if counts:
            b.step()
        if step in (5, 35):  # as a checkpoint does it, which holds a count for each parameter
            state = copy.deepcopy(a.state_dict())
            for values in state["state"].values():
                values["taken"] = values["taken"].clone()
            a.load_state_dict(state)
        for p, q in zip(ours, reference, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)
    assert [int(a.state[p]["taken"]) for p in ours] == [8, 20, 28]
    assert all(a.state[p].keys() == {"taken", "mean", "square"} for p in ours)
    assert len(a.by_steps_taken(ours)) == 3
    together = copy.deepcopy(a.state_dict())
    for values in together["state"].values():
        values["taken"] = torch.tensor(7.0)
    a.load_state_dict(together)
    assert len(a.by_steps_taken(ours)) == 1  # the kernels of one set, also after a restart


def test_muon_follows_its_formula():
    torch.manual_seed(2)
    weights = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 9))]
    lr, decay, momentum = 0.02, 0.1, 0.9
    optimizer = MuonAdamW([{"params": weights, "kind": "muon", "lr": lr, "weight_decay": decay}])
    expected = [w.detach().clone() for w in weights]
    buffers = [torch.zeros_like(w) for w in weights]
    for _ in range(3):
        for w, e, m in zip(weights, expected, buffers, strict=True):
            w.grad = torch.randn_like(w)
            m.mul_(momentum).add_(w.grad, alpha=1 - momentum)
            nesterov = (1 - momentum) * w.grad + momentum * m
            direction = orthogonalize(nesterov[None])[0]
            e.mul_(1 - lr * decay).sub_(lr * 0.2 * math.sqrt(max(w.shape)) * direction)
        optimizer.step()
    for w, e in zip(weights, expected, strict=True):
        torch.testing.assert_close(w.detach(), e, rtol=1e-5, atol=1e-6)


def test_a_tensor_of_more_dimensions_moves_as_the_matrix_of_its_first_and_its_others():
    torch.manual_seed(2)
    optimizer = MuonAdamW([{"params": [nn.Parameter(torch.zeros(1))], "kind": "muon"}])
    kernels = (torch.randn(24, 3, 5, 2), torch.randn(40, 3, 6), torch.randn(8, 1, 9))
    for kernel, direction in zip(kernels, optimizer.orthogonal(kernels), strict=True):
        (alone,) = optimizer.orthogonal((kernel.flatten(1),))
        assert direction.shape == kernel.shape
        torch.testing.assert_close(direction.flatten(1), alone, rtol=1e-4, atol=1e-5)
        assert 0.12 < direction.square().mean().sqrt() < 0.25  # about 0.2, that of AdamW


class Weights(nn.ParameterDict):
    """A network without a forward pass."""

    def is_hidden_matrix(self, name, parameter):
        return parameter.ndim == 2


@pytest.mark.parametrize("name", ["muon", "muon_all", "adamw"])
def test_a_step_that_does_not_count_leaves_no_trace(name):
    torch.manual_seed(3)
    gradients = [[torch.randn(6, 4), torch.randn(5)] for _ in range(5)]
    ends = []
    for skipped in ({0, 2}, set()):
        torch.manual_seed(4)
        weights = Weights({"a": nn.Parameter(torch.randn(6, 4)), "b": nn.Parameter(torch.randn(5))})
        optimizer = build_optimizer(weights, OptimizerConfig(name=name))
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1, 0.3
        for step, gradient in enumerate(gradients):
            if step in (0, 2) and not skipped:
                continue
            for w, g in zip(weights.values(), gradient, strict=True):
                w.grad = torch.zeros_like(g) if step in skipped else g
            optimizer.step(taken=torch.tensor(step not in skipped))
        state = [v for w in weights.values() for v in optimizer.state[w].values()]
        ends.append([w.detach() for w in weights.values()] + state)
    assert len(ends[0]) > 3
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_matrices_together_move_as_each_alone():
    """Wide and tall ones, vectors, a column, a scalar, and few rows with zeros around them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((20, 40), (40, 20), (20, 40), (9,), (30,), (16, 1), (3, 24), (24, 3), (16, 50), (10, 10), ())
    gradients = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    optimizer = MuonAdamW([{"params": [nn.Parameter(torch.zeros(2))], "kind": "muon"}])
    for g, direction in zip(gradients, optimizer.orthogonal(gradients), strict=True):
        matrix = g.view(1, -1) if g.ndim < 2 else g
        wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        exact = orthogonalize(wide[None].double())[0].float()
        exact = (exact.mT if wide is not matrix else exact).reshape(g.shape) * 0.2 * math.sqrt(max(matrix.shape))
        difference = (direction - exact).norm() / exact.norm()
        assert difference < 1e-5, g.shape
        assert direction.shape == g.shape and direction.stride() == g.stride()  # else kernels take one by one


class Launches(TorchDispatchMode):
    """Counts kernels as a GPU starts them: for a list of tensors as many as their number and blocks need,
    or one for each tensor where shapes or strides differ."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if is_view or name in ("empty_like", "new_empty", "_unsafe_view"):
            return result
        self.total += self.of_list(args) if name.startswith("_foreach") else 2 if name in TWO else 1
        return result

    @staticmethod
    def of_list(args) -> int:
        first, *others = [a for a in args if isinstance(a, list | tuple) and isinstance(a[0], torch.Tensor)]
        for other in others:
            if any(x.shape != y.shape or x.stride() != y.stride() for x, y in zip(first, other, strict=True)):
                return len(first)
        blocks = sum(-(-t.numel() // 65536) for t in first)
        return max(-(-len(first) // 48), -(-blocks // 320))


TWO = ("baddbmm", "constant_pad_nd")  # which copy or fill first


@pytest.mark.parametrize("name", ["muon", "muon_all", "adamw"])
def test_a_step_of_the_full_model_starts_few_kernels(name, monkeypatch):
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # looks at values
    with torch.device("meta"):
        model = TabICL(TabICLConfig())
    assert sum(p.numel() for p in model.parameters()) > 27e6
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    for p in model.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    taken = torch.ones((), dtype=torch.bool, device="meta")
    optimizer.step(taken=taken)
    with Launches() as launches:
        optimizer.step(taken=taken)
    assert 100 < launches.total <= 550


def test_every_parameter_is_in_one_group_and_muon_takes_hidden_matrices_only():
    model = tiny_model()
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    grouped = []
    of_muon = []
    for group in optimizer.param_groups:
        grouped += group["params"]
        if group["kind"] == "muon":
            of_muon += [names[p] for p in group["params"]]
        if not group["decayed"]:
            assert all(p.ndim == 1 for p in group["params"])
    assert len(grouped) == len(set(grouped)) == len(names)

    assert of_muon
    for name in of_muon:
        assert name.split(".")[-1] in ("weight", "in_proj_weight")
        inside_stage = name.replace("tf_icl", "").replace("tf_col", "").replace("tf_row", "")
        for part in ("encoder", "decoder", "in_linear", "cls_tokens", "ind_vectors", "ssmax", "norm"):
            assert part not in inside_stage


def test_muon_takes_the_four_matrices_of_each_block_of_a_sequence_model():
    sequence = SequenceModel(SequenceConfig(num_blocks=2, num_heads=2, width=16))
    (muon, *_) = build_optimizer(sequence, OptimizerConfig(name="muon")).param_groups
    assert muon["kind"] == "muon"
    assert len(muon["params"]) == 2 * 4  # in_proj, out_proj and two of the MLP in each block


@pytest.mark.parametrize(("name", "kind"), [("muon_all", "muon"), ("adamw", "adamw")])
def test_other_optimizers_treat_all_parameters_alike(name, kind):
    groups = build_optimizer(tiny_model(), OptimizerConfig(name=name)).param_groups
    assert {group["kind"] for group in groups} == {kind}


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ConfigError, match="there is no optimizer 'sgd'; there are muon, muon_all, adamw"):
        build_optimizer(tiny_model(), OptimizerConfig(name="sgd"))


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            ["optimizer=adamw", "optimizer.momentum=0.95", "optimizer.betas=[0.9,0.99]"],
            ["warning   optimizer.momentum has no effect, since optimizer=adamw uses Muon for no weight"],
        ),
        (
            ["optimizer=muon_all", "optimizer.momentum=0.95", "optimizer.betas=[0.9,0.99]", "optimizer.eps=1e-6"],
            [
                "warning   optimizer.betas has no effect, since optimizer=muon_all uses AdamW for no weight",
                "warning   optimizer.eps has no effect, since optimizer=muon_all uses AdamW for no weight",
            ],
        ),
        (["optimizer=muon", "optimizer.momentum=0.95", "optimizer.betas=[0.9,0.99]", "optimizer.eps=1e-6"], []),
        (["optimizer=muon_all"], []),
    ],
)
def test_options_that_concern_no_weight_are_told(settings, lines):
    config = compose(["experiment=smoke", *settings])
    module = untrained_module(config)
    assert (
        optimizer_remarks(module.model, module.configure_optimizers(), config.optimizer.name, has_decay=True) == lines
    )
