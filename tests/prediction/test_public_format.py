"""The public file format, both ways, with the released client as the judge."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, load_wine
from small_networks import draw, logits_of, peer_of, small_network

from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.config import GROUPINGS
from tabicl_train.model.public_config import from_public, to_public
from tabicl_train.model.scaling import RULES
from tabicl_train.prediction.public_format import load_public, save_public

V1 = dict(col_affine=True, col_grouping="none", col_target_aware=False, col_scaling="none", icl_scaling="none")
KEYS = {
    "max_classes", "num_quantiles", "embed_dim", "col_num_blocks", "col_nhead", "col_num_inds", "col_affine",
    "col_feature_group", "col_feature_group_size", "col_target_aware", "col_ssmax", "row_num_blocks", "row_nhead",
    "row_num_cls", "row_rope_base", "row_rope_interleaved", "icl_num_blocks", "icl_nhead", "icl_ssmax", "ff_factor",
    "dropout", "activation", "norm_first", "bias_free_ln", "zero_init", "recompute",
}  # fmt: skip

PUBLIC = [name for name, rule in RULES.items() if rule.public is not None]


@pytest.fixture
def file(tmp_path):
    network = small_network()
    path = tmp_path / "model.ckpt"
    save_public(network.config, network.state_dict(), path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        TabICLConfig(),
        TabICLConfig.v1(),
        *(TabICLConfig(col_scaling=a, icl_scaling=b) for a, b in itertools.pairwise([*PUBLIC, *PUBLIC[:1]])),
        *(TabICLConfig(col_grouping=grouping, max_classes=7, bias_free_ln=True) for grouping in GROUPINGS),
        TabICLConfig(max_classes=0, bias_free_ln=True),
        TabICLConfig(max_classes=0, num_quantiles=99),
    ],
)
def test_configuration_survives_the_round_trip(config):
    public = to_public(config)
    assert public.keys() == KEYS
    assert from_public(public) == config


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(norm_first=False), "norm_first=False is not supported"),
        (dict(activation="relu"), "activation='relu' is not supported"),
        (dict(col_ssmax="softer"), "col_ssmax='softer' is not supported"),
        (dict(col_feature_group="some"), "col_feature_group='some' is not supported"),
        (dict(embed_dim="wide"), "embed_dim='wide' is not of type int"),
        (dict(col_nhead=5), "not divisible by col_num_heads"),
    ],
)
def test_what_cannot_be_built_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        from_public({**to_public(TabICLConfig()), **change})


def test_all_missing_keys_are_named():
    public = to_public(TabICLConfig())
    del public["icl_ssmax"], public["recompute"]
    with pytest.raises(ConfigError, match="lacks icl_ssmax, recompute"):
        from_public(public)


def test_switches_of_the_client_are_understood():
    public = {**to_public(TabICLConfig()), "col_feature_group": True, "col_ssmax": True, "icl_ssmax": False}
    expected = TabICLConfig(icl_scaling="none")
    assert from_public(public) == expected
    from tabicl._model.tabicl import TabICL as Peer

    assert Peer(**public).state_dict().keys() == TabICL(expected).state_dict().keys()


@pytest.mark.parametrize("options", [{}, V1], ids=["v2", "v1"])
@pytest.mark.parametrize("data", [load_iris, load_wine])
def test_the_client_predicts_with_our_file_as_we_do(options, data, tmp_path):
    from tabicl import TabICLClassifier

    network = small_network(**options).eval()
    path = tmp_path / "model.ckpt"
    save_public(network.config, network.state_dict(), path)
    X, y = data(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    client = TabICLClassifier(
        model_path=path,
        allow_auto_download=False,
        n_estimators=1,
        norm_methods="none",
        feat_shuffle_method="none",
        class_shuffle_method="none",
        softmax_temperature=0.8,
        use_amp=False,
        device="cpu",
    ).fit(X[:100], y[:100])
    probabilities = client.predict_proba(X[100:])
    # what the client feeds its network: all rows preprocessed, (1, rows, features), and the labels, (1, labeled rows)
    ((prepared, labels),) = client.ensemble_generator_.transform(client.X_encoder_.transform(X[100:])).values()
    with torch.no_grad():
        (logits,) = logits_of(network, torch.from_numpy(prepared).float(), torch.from_numpy(labels).long())
    ours = torch.softmax(logits[:, :3] / 0.8, -1).numpy()
    assert np.abs(ours - probabilities).max() < 1e-4
    assert probabilities.std(0).max() > 0.01  # these probabilities do depend on the row
    assert client.predict(X[100:]).shape == y[100:].shape


@pytest.mark.parametrize("options", [{}, V1, dict(max_classes=0)], ids=["v2", "v1", "regression"])
def test_a_file_of_the_client_loads_here(options, tmp_path):
    peer = peer_of(small_network(**options))
    public = to_public(small_network(**options).config)
    path = tmp_path / "released.ckpt"
    torch.save({"config": public, "state_dict": peer.state_dict(), "epoch": 3}, path)
    config, weights = load_public(path)
    network = TabICL(config)
    network.load_state_dict(weights)
    X, y_train, _ = draw(2, 20, 4, 12, classes=config.max_classes)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(network, X, y_train), peer(X, y_train), rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_are_not_written(prefix, tmp_path, file):
    network = small_network()
    weights = {prefix + name.replace("blocks.0.", "blocks.0._orig_mod."): w for name, w in network.state_dict().items()}
    path = tmp_path / "prefixed.ckpt"
    save_public(network.config, weights, path)
    written = torch.load(path, weights_only=True)["state_dict"]
    assert written.keys() == network.state_dict().keys()


def test_prefixes_of_a_file_are_not_taken_out_silently(tmp_path, file):
    content = torch.load(file, weights_only=True)
    content["state_dict"] = {"module." + name: w for name, w in content["state_dict"].items()}
    torch.save(content, tmp_path / "prefixed.ckpt")
    with pytest.raises(ConfigError, match=r"prefixed\.ckpt.* do not belong to the network, for example module\."):
        load_public(tmp_path / "prefixed.ckpt")


def test_the_file_holds_no_more_than_the_weights(tmp_path):
    network = small_network()
    storage = torch.zeros(10_000_000)
    weights = network.state_dict()
    storage[:32] = weights["row_interactor.out_ln.bias"]
    weights["row_interactor.out_ln.bias"] = storage[:32]  # a view would drag its storage along
    save_public(
        network.config, {k: w.bfloat16() if "norm" in k else w for k, w in weights.items()}, tmp_path / "a.ckpt"
    )
    assert (tmp_path / "a.ckpt").stat().st_size < 2_000_000
    assert {w.dtype for w in load_public(tmp_path / "a.ckpt")[1].values()} == {torch.float32}


def test_weights_of_another_network_are_not_written(tmp_path):
    network = small_network()
    with pytest.raises(ConfigError, match="weights are missing"):
        save_public(TabICLConfig(), network.state_dict(), tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(file, monkeypatch):
    before = file.read_bytes()

    def fail(content, stream):
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    network = small_network(seed=3)
    with pytest.raises(OSError, match="disk full"):
        save_public(network.config, network.state_dict(), file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_damaged_and_foreign_files_are_named(file, tmp_path):
    content = file.read_bytes()
    bad = tmp_path / "bad.ckpt"
    for damaged in (b"", content[:1000], content[: len(content) // 2], content[:-20], b"no torch file"):
        bad.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"bad\.ckpt is truncated or not a file of weights"):
            load_public(bad)
    for foreign in (3, {"state_dict": {}}, {"config": {}, "state_dict": 1}):
        torch.save(foreign, bad)
        with pytest.raises(ConfigError, match=r"bad\.ckpt is not a file of weights"):
            load_public(bad)
    with pytest.raises(ConfigError, match=r"none\.ckpt: there is no such file"):
        load_public(tmp_path / "none.ckpt")


def test_missing_or_misshapen_weights_are_named(file, tmp_path):
    content = torch.load(file, weights_only=True)
    bias = content["state_dict"].pop("row_interactor.out_ln.bias")
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(ConfigError, match=r"bad\.ckpt: 1 weights are missing, for example row_interactor.out_ln.bias"):
        load_public(tmp_path / "bad.ckpt")
    content["state_dict"]["row_interactor.out_ln.bias"] = bias[:5]
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(ConfigError, match=r"row_interactor.out_ln.bias has shape \(5,\), the network needs \(32,\)"):
        load_public(tmp_path / "bad.ckpt")


@pytest.mark.parametrize(
    "options, setting",
    [
        ({"scaling_bound": 20.0}, r"the public format has no model\.scaling_bound \(20\.0\)"),
        ({"col_scaling": "ssa"}, r"the public format has no model\.col_scaling=ssa"),
        ({"icl_scaling": "ssa_trainable"}, r"the public format has no model\.icl_scaling=ssa_trainable"),
        ({"missing_values": True}, r"the public client imputes missing values.*\(model\.missing_values=true\)"),
    ],
)
def test_a_network_that_the_client_does_not_have_is_not_exported(options, setting, tmp_path):
    network = small_network(**options)
    with pytest.raises(ConfigError, match=rf"{setting}; format=hub and format=onnx can"):
        save_public(network.config, network.state_dict(), tmp_path / "model.ckpt")
    assert not list(tmp_path.iterdir())
