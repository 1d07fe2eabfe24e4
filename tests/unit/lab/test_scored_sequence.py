"""The scoring functions that the SSA paper compares with, against their formulas token by token, in float64."""

import math

import pytest
import torch
from networks import randomize

from priors import TableSpec, build_prior
from priors.options import check
from tabicl_train.lab.linear import bound
from tabicl_train.lab.scored_sequence import ScoredSequence, ScoredSequenceConfig
from tabicl_train.lab.scores import query_and_key_weights
from tabicl_train.lab.sequence_model import SequenceModel
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import forward_differs

SMALL = {"num_blocks": 2, "num_heads": 2, "width": 16, "ff_factor": 2, "max_tokens": 60, "max_classes": 0}


def network(**options) -> ScoredSequence:
    torch.manual_seed(0)
    built = ScoredSequence(ScoredSequenceConfig(**{**SMALL, **options}))
    randomize(built)
    return built.eval()


def packed(rows: int = 12, scale: float = 1.0) -> Pack:
    table = build_prior("linear_functions", sigma=scale).sample(TableSpec(rows, rows // 2, 1, 0), (1, 2))
    return Pack.of([(table.X, table.y, table.train_size)])


@torch.no_grad()
@pytest.mark.parametrize("score", ["cosformer", "sa_softmax"])
def test_weights_are_those_of_the_formulas(score):
    built = network(score=score)
    attention = built.transformer[0].attn
    seen = []
    attention.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    built(packed())
    ((x, output),) = seen  # (24, 16)
    x = x.double()
    qkv = x @ attention.in_proj_weight.double().T + attention.in_proj_bias.double()
    q, k, v = qkv.unflatten(1, (3, 2, 8)).unbind(1)  # (24, 2, 8)
    rows = []
    for i in range(len(x)):
        heads = []
        for head in range(2):
            weights = []
            scores = [float(q[i, head] @ k[j, head]) / math.sqrt(8) for j in range(i + 1)]
            total = sum(math.exp(z) for z in scores)
            for j in range(i + 1):
                if score == "sa_softmax":
                    weights.append(scores[j] * math.exp(scores[j]) / total)
                else:
                    product = float(q[i, head].clamp(min=0) @ k[j, head].clamp(min=0))
                    weights.append(product * math.cos(math.pi * (i - j) / 160))
            if score == "cosformer":
                total = sum(weights) + 1e-6
                weights = [weight / total for weight in weights]
            heads.append(torch.tensor(weights, dtype=torch.float64) @ v[: i + 1, head])
        rows.append(torch.cat(heads))
    expected = torch.stack(rows) @ attention.out_proj.weight.double().T + attention.out_proj.bias.double()
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("score", ["cosformer", "sa_softmax", "absent", "scaling"])
def test_a_prediction_depends_on_earlier_points_only_or_on_none_without_attention(score):
    built = network(score=score)
    assert forward_differs(built) is None
    (X, y, n), *_ = packed().tables()
    found = built(Pack.of([(X, y, n)]))
    later, earlier = y.clone(), y.clone()
    later[6:] += 1
    earlier[:2] += 1
    torch.testing.assert_close(built(Pack.of([(X, later, n)]))[:7], found[:7], rtol=0, atol=1e-6)
    changed = not torch.allclose(built(Pack.of([(X, earlier, n)]))[2:], found[2:], atol=1e-4)
    assert changed == (score != "absent")


@torch.no_grad()
def test_with_the_default_score_it_is_the_transformer_with_raised_outputs_and_bound():
    raised = network(output_scale=8.0)
    plain = SequenceModel(raised.config)
    plain.load_state_dict(raised.state_dict())
    pack = packed(scale=100.0)
    torch.testing.assert_close(raised(pack), 8 * plain.eval()(pack))
    assert raised(pack).abs().max() <= 8 * bound(raised)


@torch.no_grad()
def test_without_the_last_norm_outputs_are_linear_in_the_last_tokens_and_unbounded():
    built = network(head_norm=False)
    assert bound(built) == math.inf
    tokens = torch.randn(3, 16)
    outputs = built.head(tokens) - built.head[1].bias
    torch.testing.assert_close(built.head(100 * tokens) - built.head[1].bias, 100 * outputs)


def test_mistakes_are_named():
    found = check(ScoredSequenceConfig(score="cosine", output_scale=0))
    assert found[0].startswith("score is 'cosine'; it must be one of scaling, absent, cosformer")
    assert len(found) == 2
    (problem,) = ScoredSequenceConfig(score="sa_softmax", scaling="ssa").problems()
    assert "no effect with score=sa_softmax" in problem
    (problem,) = ScoredSequenceConfig(score="cosformer").problems()
    assert problem == "cosformer_length is 80; it must be at least max_tokens (512)"


@torch.no_grad()
def test_weights_of_queries_and_keys_include_the_gain_before_them_and_no_values():
    built = network()
    for block in built.transformer:
        block.attn.in_proj_weight[:32] = 3.0
        block.attn.in_proj_weight[32:] = 100.0
        block.norm1.weight[:] = 2.0
    assert query_and_key_weights(built) == pytest.approx(6.0)
    assert math.isnan(query_and_key_weights(network(score="absent")))
