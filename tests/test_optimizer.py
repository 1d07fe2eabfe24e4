import math

import torch
from torch import nn

from tabicl_train.config import OptimizerConfig
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.optimizer import MuonAdamW, build_optimizer, orthogonalise


def tiny_model() -> TabICL:
    torch.manual_seed(0)
    return TabICL(
        TabICLConfig(
            embed_dim=16, col_num_blocks=1, col_num_inducing=4, row_num_blocks=1, row_num_cls=2, icl_num_blocks=1
        )
    )


def test_orthogonalise_moves_singular_values_to_one_and_keeps_directions():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 20, 8), (2, 8, 20), (1, 12, 12)):
        X = torch.randn(shape, generator=generator)
        result = orthogonalise(X, 5)
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        inside = U.mT @ result @ Vh.mT  # diagonal where the singular vectors are kept
        values = inside.diagonal(dim1=1, dim2=2)
        assert ((values > 0.3) & (values < 1.3)).all()  # the quintic ends around 1, less for tiny singular values
        assert (inside - torch.diag_embed(values)).abs().max() < 1e-4
        assert result.dtype == X.dtype


def test_adamw_agrees_with_torch():
    torch.manual_seed(1)
    ours, theirs = nn.Linear(5, 7).double(), nn.Linear(5, 7).double()
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(betas=[0.8, 0.97], eps=1e-6)
    a = MuonAdamW([{"params": list(ours.parameters()), "kind": "adamw", "lr": 0.01, "weight_decay": 0.1}], config)
    b = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.1)
    for step in range(7):
        X = torch.randn(11, 5, dtype=torch.float64)
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            (model(X).pow(2).sum() * (1 + step)).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_muon_follows_its_formula():
    torch.manual_seed(2)
    weights = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 9))]
    lr, decay, momentum = 0.02, 0.1, 0.9
    optimizer = MuonAdamW([{"params": weights, "kind": "muon", "lr": lr, "weight_decay": decay}], OptimizerConfig())
    expected = [w.detach().clone() for w in weights]
    buffers = [torch.zeros_like(w) for w in weights]
    for _ in range(3):
        for w, e, m in zip(weights, expected, buffers, strict=True):
            w.grad = torch.randn_like(w)
            m.mul_(momentum).add_(w.grad, alpha=1 - momentum)
            nesterov = (1 - momentum) * w.grad + momentum * m
            direction = orthogonalise(nesterov[None], 5)[0]
            e.mul_(1 - lr * decay).sub_(lr * 0.2 * math.sqrt(max(w.shape)) * direction)
        optimizer.step()
    for w, e in zip(weights, expected, strict=True):
        torch.testing.assert_close(w.detach(), e, rtol=1e-5, atol=1e-6)


def test_every_parameter_is_in_one_group_and_muon_takes_hidden_matrices_only():
    model = tiny_model()
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(names)
    muon = {names[p] for group in optimizer.param_groups if group["kind"] == "muon" for p in group["params"]}
    assert muon and all(names_end in ("weight", "in_proj_weight") for names_end in (n.split(".")[-1] for n in muon))
    for part in ("encoder", "decoder", "in_linear", "cls_tokens", "ind_vectors", "ssmax", "norm"):
        forbidden = [n for n in muon if part in n.replace("tf_icl", "").replace("tf_col", "").replace("tf_row", "")]
        assert not forbidden, forbidden
    for group in optimizer.param_groups:
        if not group["decayed"]:
            assert all(p.ndim == 1 for p in group["params"])
    adamw = build_optimizer(model, OptimizerConfig(name="adamw"))
    assert {group["kind"] for group in adamw.param_groups} == {"adamw"}


def test_a_step_without_gradients_changes_nothing():
    model = tiny_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = build_optimizer(model, OptimizerConfig())
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.1, 0.1
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
