"""The transformer over sequences: against its formulas in float64, and what each of its tokens may see."""

import math
from dataclasses import replace

import averaging_flops  # noqa: F401  # formulas for the counter
import pytest
import torch
from networks import randomize
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

from priors.options import check
from tabicl_train.errors import ConfigError
from tabicl_train.lab import quantifiers
from tabicl_train.lab.causal import weights_of_token
from tabicl_train.lab.sequence_config import SequenceConfig
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.model.pack import Pack

SMALL = SequenceConfig(num_blocks=2, num_heads=2, width=16, ff_factor=2, max_tokens=60)
CONFIGS = {
    "softmax": SMALL,
    "numbers": replace(SMALL, max_classes=0),
    "without MLP": replace(SMALL, ff_factor=0),
    "SSA": replace(SMALL, scaling="ssa_trainable", max_classes=0),
    "SSA without MLP": replace(SMALL, scaling="ssa", ff_factor=0),
}


def network(config: SequenceConfig) -> SequenceModel:
    torch.manual_seed(0)
    made = SequenceModel(config)
    randomize(made)
    return made.eval()


def tables(config: SequenceConfig, *shapes: tuple[int, int]) -> list:
    generator = torch.Generator().manual_seed(1)
    found = []
    for N, M in shapes:
        X = torch.randn(N, M, generator=generator)
        classes = torch.randint(0, max(config.max_classes, 1), (N,), generator=generator)
        found.append((X, torch.randn(N, generator=generator) if config.is_regression else classes, N // 2))
    return found


def by_formula(made: SequenceModel, X, y) -> torch.Tensor:
    """Predictions for the rows of one table, token by token, in float64."""
    c, p = made.config, {name: value.detach().double() for name, value in made.state_dict().items()}
    tokens = []
    for x, label in zip(X.double(), y, strict=True):
        tokens += [value * p["embedding.number.weight"][:, 0] for value in x]
        weight = p["embedding.label.weight"]
        tokens.append((weight[:, 0] * label if c.is_regression else weight[:, label]) + p["embedding.label.bias"])
    h = torch.stack(tokens) + p["embedding.position.weight"][: len(tokens)]
    for i in range(c.num_blocks):
        w = {name.removeprefix(f"transformer.{i}."): value for name, value in p.items() if f"transformer.{i}." in name}
        h = h + attention(c, w, layer_norm(h, (c.width,), w["norm1.weight"], w["norm1.bias"]))
        if c.ff_factor:
            hidden = layer_norm(h, (c.width,), w["norm2.weight"], w["norm2.bias"])
            hidden = gelu(hidden @ w["linear1.weight"].T + w["linear1.bias"])
            h = h + hidden @ w["linear2.weight"].T + w["linear2.bias"]
    last = h.view(len(y), -1, c.width)[:, -2]
    return layer_norm(last, (c.width,), p["head.0.weight"], p["head.0.bias"]) @ p["head.1.weight"].T + p["head.1.bias"]


def attention(c: SequenceConfig, w: dict, x: torch.Tensor) -> torch.Tensor:
    d, outs = c.width // c.num_heads, []
    q, k, v = (x @ w["attn.in_proj_weight"].T + w["attn.in_proj_bias"]).split(c.width, 1)
    for head in range(c.num_heads):
        own = slice(head * d, (head + 1) * d)
        rows = []
        for i in range(len(x)):
            z = k[: i + 1, own] @ q[i, own] / math.sqrt(d)
            if c.scaling == "none":
                weights = z.exp()
            else:
                excess = w.get("attn.ssmax_layer.log_excess")
                power = c.ssa_exponent if excess is None else 1 + excess[head].exp()
                weights = (1 + w["attn.ssmax_layer.log_b"][head].exp() * z.abs()) ** (z.sign() * power)
            rows.append(weights / weights.sum() @ v[: i + 1, own])
        outs.append(torch.stack(rows))
    return torch.cat(outs, 1) @ w["attn.out_proj.weight"].T + w["attn.out_proj.bias"]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_predictions_are_those_of_the_formulas_and_a_pack_is_its_tables(name):
    made = network(CONFIGS[name])
    batch = tables(made.config, (5, 1), (5, 1), (12, 1), (5, 3), (1, 1), (20, 2))
    expected = torch.cat([by_formula(made, X, y) for X, y, _ in batch])
    found = made(Pack.of(batch))
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert torch.allclose(torch.cat([made(Pack.of([table])) for table in batch]), found, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_nothing_later_changes_a_prediction(name):
    made = network(CONFIGS[name])
    X, y, n = tables(made.config, (12, 2))[0]
    before = made(Pack.of([(X, y, n)]))
    for row in range(12):
        changed_X, changed_y = X.clone(), y.clone()
        changed_X[row, 1] += 1
        changed_y[row] = 1 - changed_y[row]
        assert torch.equal(made(Pack.of([(X, changed_y, n)]))[: row + 1], before[: row + 1])
        after = made(Pack.of([(changed_X, y, n)]))
        assert torch.equal(after[:row], before[:row])
        assert not torch.isclose(after[row:], before[row:]).all(1).any()
    assert torch.equal(made(Pack.of([(X, y, 1)])), before)  # the number of labeled rows has no effect


def test_losses_are_means_over_all_rows():
    for name, loss in (("softmax", torch.nn.functional.cross_entropy), ("numbers", torch.nn.functional.mse_loss)):
        made = network(CONFIGS[name])
        batch = tables(made.config, (5, 1), (9, 1))
        predictions = made(Pack.of(batch))
        own = zip(predictions.split([5, 9]), batch, strict=True)
        expected = [loss(p[:, 0] if made.config.is_regression else p, y) for p, (_, y, _) in own]
        assert torch.allclose(made.losses(predictions, Pack.of(batch)), torch.stack(expected))


def test_guesses_know_the_labels_before_a_row_only():
    classes = torch.tensor([1, 0, 1, 1])
    expected = -sum(math.log(p) for p in (1 / 2, 1 / 3, 2 / 4, 3 / 5)) / 4
    assert SequenceModel.guess_loss(classes, 2) == pytest.approx(expected)
    assert SequenceModel.guess_loss(torch.tensor([2.0, 4.0, 0.0]), 1) == pytest.approx((2**2 + 2**2 + 3**2) / 3)


@pytest.mark.parametrize("name", ["SSA", "SSA without MLP"])
def test_flops_agree_with_a_count_of_the_kernels(name):
    """Those of softmax are the same: torch does not count its kernel for CPUs."""
    config = replace(CONFIGS[name], max_tokens=300, width=32)
    X, y, n = tables(config, (100, 2))[0]
    with FlopCounterMode(display=False) as counter:
        SequenceModel(config)(Pack.of([(X, y, n)]))
    assert SequenceModel.forward_flops(config, 100, n, 2) == pytest.approx(counter.get_total_flops(), rel=0.02)
    softmax = replace(config, scaling="none")
    assert SequenceModel.forward_flops(config, 100, n, 2) == SequenceModel.forward_flops(softmax, 100, n, 2)


@pytest.mark.parametrize("name", ["softmax", "SSA"])
def test_kept_values_are_about_those_that_autograd_keeps(name):
    config = replace(CONFIGS[name], max_tokens=300, width=32, num_blocks=6)
    made, kept = SequenceModel(config), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / 4
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in made.parameters()}
    X, y, n = tables(config, (100, 2))[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        predictions = made(Pack.of([(X, y, n)]))
    values = sum(size for place, size in kept.items() if place not in weights)
    assert len(predictions) == 100
    assert 0.7 < values / SequenceModel.kept_values(config, 100, n, 2) < 1.1


def test_impossible_settings_and_tables_are_told():
    wrong = SequenceConfig("lines", 11, 0, 3, 16, -1, "ssmax", 1.0, dropout=1.0)
    words = (
        "family is 'lines'",
        "num_blocks is 0",
        "ff_factor is -1",
        "max_classes is 11",
        "width (16) is not divisible",
    )
    for word in (*words, "dropout is 1.0", "scaling is 'ssmax'", "ssa_exponent is 1.0"):
        assert any(problem.startswith(word) for problem in check(wrong)), word
    assert check(SMALL) == []
    assert "no effect" in replace(SMALL, ssa_exponent=2.0).problems()[0]
    with pytest.raises(ValueError, match="21 rows of 2 numbers and a label are 63 tokens, more than"):
        network(SMALL)(Pack.of(tables(SMALL, (21, 2))))
    with pytest.raises(ValueError, match=r"X is torch.float32 and y torch.float32; they must be float32 and int64"):
        network(SMALL)(Pack.of(tables(CONFIGS["numbers"], (5, 1))))
    with pytest.raises(ConfigError, match="the public format has no networks over sequences"):
        SequenceModel.to_public(SMALL)


@pytest.mark.parametrize("name", ["softmax", "SSA"])
@torch.no_grad()
def test_weights_of_a_token_lead_to_the_output_of_the_layer(name):
    made = network(CONFIGS[name])
    attention = made.transformer[-1].attn
    seen = {}
    attention.register_forward_pre_hook(lambda _, arguments: seen.update(x=arguments[0]))
    attention.out_proj.register_forward_pre_hook(lambda _, arguments: seen.update(out=arguments[0]))
    made(Pack.of(tables(CONFIGS[name], (7, 1), (7, 1))))
    x, out = (seen[key].unflatten(0, (2, 14)) for key in ("x", "out"))
    for token in (0, 5, 12):
        weights = weights_of_token(attention, x, token)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        qkv, _ = attention.project(x[:, : token + 1].flatten(0, 1), None)
        v = qkv[:, 2].unflatten(0, (2, -1)).double()  # (sequences, token + 1, H, d)
        expected = torch.einsum("bht,bthd->bhd", weights, v).flatten(1)
        torch.testing.assert_close(expected.float(), out[:, token], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("row", "token"), [(0, 0), (-1, 12), (-2, 10)])
def test_the_weight_on_a_row_is_that_on_its_number(row, token):
    made = network(SMALL)
    pack = Pack.of(tables(SMALL, (7, 1), (7, 1)))
    seen = {}
    attention = made.transformer[-1].attn
    attention.register_forward_pre_hook(lambda _, arguments: seen.update(x=arguments[0]))
    with torch.no_grad():
        made(pack)
        x = seen["x"].unflatten(0, (2, 14))
        weights = weights_of_token(attention, x, 12)
    assert quantifiers.weight_on(attention, x, row) == pytest.approx(weights[..., token].mean().item())
