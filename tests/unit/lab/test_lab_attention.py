"""One query, step by step: against numpy, from the layer's tokens and weights, and against the network's output."""

import dataclasses
import json
import math
import re

import numpy as np
import pandas as pd
import pytest
from command_line import command
from networks import small_network
from scipy.special import erf

from tabicl_train import TabICLClassifier, register
from tabicl_train.lab import attention as lab_attention
from tabicl_train.lab.attention import AttentionOptions, explain, page, scene_of


def explained(network, table, layer, head, **options):
    options = AttentionOptions(folder="", checkpoint="", table=str(table), target="class", **options)
    return explain(scene_of(options, network), layer, head)


def data_of(network, table, layer, head, **options):
    """What the page holds as JSON."""
    explanation = explained(network, table, layer, head, **options)
    return json.loads(json.dumps(dataclasses.asdict(explanation), allow_nan=False))


def numpy_mlp(weights, name, x):
    hidden = x @ weights[f"{name}.0.weight"].T + weights[f"{name}.0.bias"]
    hidden = 0.5 * hidden * (1 + erf(hidden / math.sqrt(2)))
    return hidden @ weights[f"{name}.2.weight"].T + weights[f"{name}.2.bias"]


def numpy_attention(attention, rule, head, query, keys, hidden):
    """All steps in numpy from the tokens (E,), (K, E) and the weights of the layer; `hidden` keys follow, masked."""
    weights = {name: w.detach().double().numpy() for name, w in attention.state_dict().items()}
    H, d = attention.num_heads, attention.dim // attention.num_heads
    own = [slice(part * attention.dim + head * d, part * attention.dim + (head + 1) * d) for part in range(3)]
    (wq, bq), (wk, bk), (wv, bv) = ((weights["in_proj_weight"][at], weights["in_proj_bias"][at]) for at in own)
    q, k, v = wq @ query + bq, keys @ wk.T + bk, keys @ wv.T + bv
    log_n, base, gate = np.array([math.log(len(keys))]), None, None
    if rule == "ssmax":
        base = weights["ssmax_layer.scales"][head] * log_n
    elif rule.startswith("ssmax_mlp"):
        base = numpy_mlp(weights, "ssmax_layer.mlp", log_n).reshape(H, -1)[head]
    elif rule.startswith("qassmax"):
        base = numpy_mlp(weights, "ssmax_layer.base_mlp", log_n).reshape(H, -1)[head]
        gate = 1 + np.tanh(numpy_mlp(weights, "ssmax_layer.query_mlp", q))
    elif register.scaling[rule].averages:
        base = np.exp(weights["ssmax_layer.log_b"][[head]])
    steps = {"score": k @ q, "divided": k @ q / math.sqrt(d)}
    steps["based"] = k @ (q * (1 if base is None else base)) / math.sqrt(d)
    scaled = q * (1 if base is None else base) * (1 if gate is None else gate)
    z = steps["scaled"] = k @ scaled / math.sqrt(d)
    if register.scaling[rule].averages:
        p = 1.5 if rule == "ssa" else 1 + math.exp(weights["ssmax_layer.log_excess"][head])
        z = np.sign(z) * p * np.log1p(np.abs(z))
    steps["logit"] = z
    masked = np.append(z, np.full(hidden, -np.inf))
    w = np.exp(masked - masked.max())
    w /= w.sum()
    return q, k, v, base, gate, scaled, steps, w


@pytest.mark.parametrize("layer, head", [(0, 3), (1, 1)])
@pytest.mark.parametrize("rule", register.scaling)
def test_every_number_is_what_numpy_computes(rule, layer, head, table, monkeypatch):
    monkeypatch.setattr(lab_attention, "SAMPLE", 11)
    network = small_network(col_scaling=rule, icl_scaling=rule, max_classes=4)
    data = data_of(network, table, layer, head, row=7)
    assert data["rule"] == rule
    assert data["n"] == len(data["keys"]) == 11
    assert data["rest"] is None
    attention = network.icl_predictor.tf_icl["blocks"][layer].attn
    keys = np.array([key["token"] for key in data["keys"]])
    query = np.array(data["query"]["token"])
    q, k, v, base, gate, scaled, steps, w = numpy_attention(attention, rule, head, query, keys, len(data["hidden"]))

    def agrees(found, expected):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())

    agrees(data["query"]["q"], q)
    for name, vectors in (("k", k), ("v", v)):
        agrees([key[name] for key in data["keys"]], vectors)
    for name, factor in (("base", base), ("gate", gate)):
        assert (data["query"][name] is None) == (factor is None)
        if factor is not None:
            agrees(data["query"][name], np.broadcast_to(factor, len(q)))
    agrees(data["query"]["scaled"], scaled)
    for name, values in steps.items():
        agrees([key[name] for key in data["keys"]], values)
    weights = np.array([key["weight"] for key in data["keys"]])
    agrees(weights, w[:11])
    assert (np.diff(weights) <= 0).all()
    assert math.isclose(weights.sum(), 1, rel_tol=1e-12)
    assert [row["weight"] for row in data["hidden"]] == w[11:].tolist() == [0.0] * 4
    assert data["root"] == math.sqrt(data["d"])
    assert data["log_n"] == math.log(11)
    agrees(data["context"], w[:11] @ v)
    assert math.isclose(data["entropy"], -(w[:11] * np.log(w[:11])).sum() / math.log(11), rel_tol=1e-4)
    for one in data["by_label"]:
        own = [key["weight"] for key in data["keys"] if key["label"] == one["label"]]
        assert one["rows"] == len(own)
        assert math.isclose(one["weight"], sum(own), rel_tol=1e-12)


def test_rows_and_prediction_are_those_of_the_table(table):
    frame = pd.read_csv(table)
    X = frame.drop(columns="class")
    y = frame["class"]
    network = small_network(max_classes=4)
    data = data_of(network, table, 0, 0, row=7)

    hidden = [row["row"] for row in data["hidden"]]
    assert hidden[0] == 7
    assert len(set(hidden)) == 4
    assert data["n"] == 76
    assert data["query"]["label"] == y[7]
    labeled = [row for row in range(80) if row not in hidden]
    for key in data["keys"]:
        row = key["row"]
        assert row in labeled
        assert key["label"] == y[row]
        assert key["cells"][:2] == [f"{X['height'][row]:.4g}", X["color"][row]]

    plain = TabICLClassifier(network, n_estimators=1, norm_methods=("none",)).fit(X.iloc[labeled], y[labeled])
    alone = plain.predict_proba(X.iloc[[7]])[0]  # query rows do not see each other
    assert [one["label"] for one in data["prediction"]] == list(plain.classes_)
    np.testing.assert_allclose([one["p"] for one in data["prediction"]], alone, atol=1e-6)


@pytest.mark.parametrize(
    "rule, steps",
    [("none", []), ("ssmax", ["based"]), ("qassmax", ["based", "scaled"]), ("ssa_trainable", ["based", "logit"])],
)
def test_the_page_has_the_steps_of_the_rule(rule, steps, table):
    source = page(explained(small_network(icl_scaling=rule, max_classes=4), table, 0, 1, row=7))
    found = re.findall(r'data-step="(\w+)"', source)
    assert found == [
        "tokens", "qkv", "score", "divided", *steps, "visibility", "weight", "context", "prediction",
    ]  # fmt: skip
    assert ("signed averaging" in source) == rule.startswith("ssa")
    heads = {"based": "with b" if "logit" in steps else "with base", "scaled": "with gate", "logit": "signed logarithm"}
    for step, head in heads.items():
        assert (f"<th>{head}</th>" in source) == (step in steps)


def test_many_keys_are_the_largest_two_others_and_the_rest_together(table):
    network = small_network(max_classes=4)
    data = data_of(network, table, 0, 1, row=7)
    weights = [key["weight"] for key in data["keys"]]
    assert len(weights) == 12
    assert sorted(weights, reverse=True) == weights
    assert data["rest"]["count"] == 76 - 12
    assert math.isclose(sum(weights) + data["rest"]["weight"], 1, rel_tol=1e-12)
    assert math.isclose(sum(one["weight"] for one in data["by_label"]), 1, rel_tol=1e-12)
    assert sum(one["rows"] for one in data["by_label"]) == 76
    context = np.array(data["rest"]["context"]) + sum(key["weight"] * np.array(key["v"]) for key in data["keys"])
    np.testing.assert_allclose(context, data["context"], atol=1e-6)
    assert data["rest"]["weight"] <= 64 * weights[9]


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["table=FILE", "row=80"], "it must be one of the rows 0..79"),
        (["table=FILE", "target=nothing"], "has the columns height, class, color, weight"),
        (["table=FILE", "target=height"], "76 labeled rows, classes among them: 76"),
        (["table=missing.csv"], "missing.csv cannot be read: No such file"),
        (["table=FILE", "target=class", "head=2"], "the layer has the heads 0..1"),
        (["table=FILE", "target=class", "layer=2"], "the network has the layers 0..1"),
    ],
)  # fmt: skip
def test_mistakes_are_named(settings, problem, run_dir, table, tmp_path):
    settings = [text.replace("FILE", str(table)) for text in settings]
    result = command("lab", "attention", f"folder={tmp_path}/page", f"checkpoint={run_dir}", *settings)
    assert result.returncode == 2
    assert problem in result.stderr
    assert not (tmp_path / "page").exists()
