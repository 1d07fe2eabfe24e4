"""Exports: weights survive every format, others read them as we do, and what cannot be written or read is named."""

import copy
import io
import itertools
import re
import signal
import zipfile
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from command_line import command
from networks import TINY, draw_batch, forward_batch, package_network, small_network
from table_files import write_table_files as write_tables
from tiers import slow_except
from training_runs import UNTRAINED_STEP, write_untrained_run

from tabicl_train import TabICLClassifier, TabICLRegressor
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.public_config import from_public, to_public
from tabicl_train.outputs import write_atomically
from tabicl_train.run.checkpoint import remove_temporary_files
from tabicl_train.weights.export import best_in_words, export, export_weights, save_public
from tabicl_train.weights.hub_format import save_hub
from tabicl_train.weights.pretrained import Pretrained, TrainedRange
from tabicl_train.weights.reader import build_model, load_model, read_weights

V1 = dict(col_affine=True, col_grouping="none", col_target_aware=False, col_scaling="none", icl_scaling="none")
KEYS = {
    "max_classes", "num_quantiles", "embed_dim", "col_num_blocks", "col_nhead", "col_num_inds", "col_affine",
    "col_feature_group", "col_feature_group_size", "col_target_aware", "col_ssmax", "row_num_blocks", "row_nhead",
    "row_num_cls", "row_rope_base", "row_rope_interleaved", "icl_num_blocks", "icl_nhead", "icl_ssmax", "ff_factor",
    "dropout", "activation", "norm_first", "bias_free_ln", "zero_init", "recompute",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict]:
    """A run and its weights by kind; tests must not change it."""
    folder = tmp_path_factory.mktemp("made") / "run"
    return folder, write_untrained_run(folder)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("file") / "tiny.ckpt"
    save_public(TINY, TabICL(TINY).state_dict(), path)
    return path


# One of three kinds that take the same way.
@pytest.mark.parametrize("weights", slow_except(("trained", "ema", "best"), ("ema", "best")))
def test_weights_and_their_origin_survive_every_way_through_the_formats(weights, made, tmp_path):
    run_dir, kinds = made
    expected = kinds[weights]
    export(str(run_dir), str(tmp_path / "1.ckpt"), weights)
    outputs = ["1.ckpt", "2", "3.safetensors", "4", "new/5.pt"] if weights == "best" else ["1.ckpt", "2"]
    for source, output in itertools.pairwise(outputs):
        export(str(tmp_path / source), str(tmp_path / output))
    step, commit = (
        (5, "first") if weights == "best" else (UNTRAINED_STEP, "c0ffee")
    )  # best.ckpt itself does not hold the commit
    for output in outputs:
        exported = read_weights(str(tmp_path / output))
        assert exported.tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.tensors.items())
        assert [exported.origin[key] for key in ("weights", "step", "commit")] == [weights, step, commit]
        # 40..80 rows of which 0.3..0.9 are labeled
        assert exported.trained_range == TrainedRange((12, 72), (2, 6), classes=10)


def test_no_export_names_folders_of_this_machine(tmp_path):
    place = tmp_path / "folders of" / "somebody"
    place.mkdir(parents=True)
    tables, first, run_dir = place / "own tables", place / "first", place / "run"
    write_tables(tables)
    write_untrained_run(first)
    given = ["prior=tables", f"prior.folder='{tables}'", f"init_weights='{first}'", f"wandb.group='{place}/group'"]
    write_untrained_run(run_dir, *given)
    checkpoint = run_dir / f"checkpoints/step-{UNTRAINED_STEP:08d}.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    content["run"]["command"] += [*given, f"prior={{name: tables, folder: '{tables}'}}", "--config-dir", str(place)]
    torch.save(content, checkpoint)

    outputs = ["1.ckpt", "2.safetensors", "3"]
    for source, output in itertools.pairwise([str(checkpoint), *outputs]):
        export(str(tmp_path / source), str(tmp_path / output))
    for path in (tmp_path / "1.ckpt", tmp_path / "2.safetensors", *(tmp_path / "3").iterdir()):
        assert b"folders of" not in path.read_bytes(), path.name
    for output in outputs:
        origin = read_weights(str(tmp_path / output)).origin
        assert (origin["run"], origin["config"]["init_weights"]) == ("run", "first")
        assert (origin["config"]["prior"]["folder"], origin["config"]["wandb"]["group"]) == ("own tables", "group")
        assert origin["command"][-4] == "wandb.group='group'"
        assert origin["command"][-3:] == ["prior={name: tables, folder: 'own tables'}", "--config-dir", "somebody"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"validation": {"best": "synthetic"}}, ["synthetic tables of 64 rows (loss 1.0000)"]),
        ({"validation": {"best": "own"}}, ["own tables of 90 rows (loss 2.0000)"]),
        ({"validation": {"best": "real"}}, ["iris of 150 rows (loss 3.0000)"]),
        (None, ["synthetic tables of 64", "own tables of 90", "iris of 150"]),  # not recorded
    ],
)
def test_only_tables_that_chose_the_best_weights_are_named(config, names):
    rows = [
        {"step": 4, "data": data, "rows": rows, "loss": loss, "trained_range": trained_range}
        for data, rows, loss, trained_range in (
            ("synthetic", 64, 1.0, "inside"),
            ("own", 90, 2.0, "inside"),
            ("iris", 150, 3.0, "inside"),
            ("synthetic", 9000, 4.0, "outside"),
            ("own", 9000, 4.0, "outside"),
            ("digits", 9000, 4.0, "outside"),
        )
    ]
    text = best_in_words({"step": 4, "config": config, "validation": rows})
    assert text.startswith(f"the best weights are of step 4, by validation on {names[0]}")
    assert all(name in text for name in names) and text.count(" rows ") == len(names)
    assert best_in_words({"step": 4, "config": config, "validation": None}) == "the best weights are of step 4"


# A large network takes half a CPU second and more.
@pytest.mark.parametrize("model", slow_except(("tabicl_v1", "tabicl_v2", "tabicl_v2_regression"), ("tabicl_v2",)))
def test_every_preset_predicts_alike_from_both_formats_and_in_the_tabicl_package(model, tmp_path):
    tabicl = pytest.importorskip("tabicl")
    weights = write_untrained_run(tmp_path / "run", f"model={model}")["trained"]
    for output in ("m.ckpt", "m"):
        export(str(tmp_path / "run"), str(tmp_path / output), "newest")
        exported = read_weights(str(tmp_path / output))
        assert exported.config == read_weights(str(tmp_path / "run")).config
        assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.tensors.items())
    X, y = np.random.default_rng(0).uniform(-1, 1, size=(30, 3)), np.arange(20) % 3
    options = dict(n_estimators=1, device="cpu")
    of_package = dict(
        model_path=tmp_path / "m.ckpt", allow_auto_download=False, feat_shuffle_method="none", norm_methods="none"
    )
    if exported.config.is_regression:
        theirs = tabicl.TabICLRegressor(**of_package, **options)
        ours = TabICLRegressor(tmp_path / "m", **options, norm_methods=("none",))
        p, q = (regressor.fit(X[:20], y).predict(X[20:]) for regressor in (theirs, ours))
    else:
        theirs = tabicl.TabICLClassifier(**of_package, **options, class_shuffle_method="none")
        ours = TabICLClassifier(tmp_path / "m", **options, norm_methods=("none",))
        p, q = (classifier.fit(X[:20], y).predict_proba(X[20:]) for classifier in (theirs, ours))
    assert np.abs(p - q).max() < 1e-5 and np.ptp(p, axis=0).max() > 1e-3


@pytest.mark.parametrize("options", [{}, V1, dict(max_classes=0)], ids=["v2", "v1", "regression"])
def test_a_file_of_the_tabicl_package_loads_here(options, tmp_path):
    network = small_network(**options)
    peer, path = package_network(network), tmp_path / "released.ckpt"
    torch.save({"config": to_public(network.config), "state_dict": peer.state_dict(), "epoch": 3}, path)
    loaded = read_weights(str(path))
    X, y_train, _ = draw_batch(2, 20, 4, 12, classes=loaded.config.max_classes)
    with torch.no_grad():
        ours = forward_batch(build_model(loaded), X, y_train)
        torch.testing.assert_close(ours, peer(X, y_train), rtol=0, atol=1e-5)
    assert loaded.trained_range is None


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ("model.scaling_bound=5", r"the public format has no model\.scaling_bound \(5\.0\)"),
        ("model.col_scaling=ssa", r"the public format has no model\.col_scaling=ssa, it has none, ssmax"),
    ],
)
def test_a_network_that_the_public_format_lacks_goes_to_the_hub_only(options, setting, tmp_path):
    write_untrained_run(tmp_path / "run", options)
    with pytest.raises(ConfigError, match=rf"{setting}.*; format=hub and format=onnx can") as caught:
        export(str(tmp_path / "run"), str(tmp_path / "m.ckpt"))
    assert len(caught.value.problems) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export(str(tmp_path / "run"), str(tmp_path / "m"))
    X, y_train, _ = draw_batch(1, 30, 3, 20)
    networks = [load_model(str(tmp_path / name)) for name in ("run", "m")]
    assert networks[0].config == networks[1].config
    assert torch.equal(*(forward_batch(network, X, y_train) for network in networks))


@pytest.mark.parametrize(
    "config",
    [
        TabICLConfig.v1(),
        TabICLConfig(col_scaling="ssmax_mlp_elementwise", icl_scaling="qassmax", col_grouping="disjoint"),
        TabICLConfig(max_classes=0, num_quantiles=99, bias_free_ln=True),
    ],
)
def test_a_configuration_survives_the_round_trip(config):
    public = to_public(config)
    assert public.keys() == KEYS
    assert from_public(public) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(col_ssmax="softer"), "col_ssmax='softer' is not supported"),
        (dict(embed_dim="wide"), "embed_dim='wide' is not of type int"),
        (["icl_ssmax", "recompute"], "lacks icl_ssmax, recompute"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused(change, message):
    public = to_public(TabICLConfig())
    public = {k: v for k, v in public.items() if k not in change} if isinstance(change, list) else public | change
    with pytest.raises(ConfigError, match=message):
        from_public(public)


def test_switches_of_the_tabicl_package_are_understood():
    public = {**to_public(TabICLConfig()), "col_feature_group": True, "col_ssmax": True, "icl_ssmax": False}
    expected = TabICLConfig(icl_scaling="none")
    assert from_public(public) == expected
    peer = pytest.importorskip("tabicl._model.tabicl").TabICL
    assert peer(**public).state_dict().keys() == TabICL(expected).state_dict().keys()


def test_the_file_holds_no_more_than_the_weights(tmp_path):
    network = small_network()
    storage, weights = torch.zeros(10_000_000), network.state_dict()
    storage[:32] = weights["row_interactor.out_ln.bias"]
    weights["row_interactor.out_ln.bias"] = storage[:32]  # a view would drag its storage along
    halves = {name: w.bfloat16() if "norm" in name else w for name, w in weights.items()}
    save_public(network.config, halves, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").stat().st_size < 2_000_000
    assert {w.dtype for w in read_weights(str(tmp_path / "a.ckpt")).tensors.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["output=y.ckpt"], "there is no such file or run directory"),
        (["output=m.pt", "format=hub"], "output is 'm.pt', a name for format=tabicl, but format is hub"),
        (["output=m", "format=torch"], "there is no export format 'torch'; there are tabicl, safetensors, hub, onnx"),
        (["output=m.bin"], r"its name decides the format: FILE.ckpt, .pt or .pth (tabicl), FILE.safetensors"),
    ],
)
def test_wrong_arguments_end_with_2_and_no_trace(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("export", "checkpoint=nowhere", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("folder.ckpt", "a folder, not a file"),
        ("file", "a file, not a folder"),
        ("file/m", "file is a file"),
        ("full/m.ckpt", "it cannot be written"),
        (f"{'x' * 240}.ckpt", r"it cannot be created \(File name too long\)"),  # under a longer name, at first
    ],
)
def test_an_output_that_cannot_be_is_refused(output, words, file, tmp_path, monkeypatch):
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "file").touch()
    if output.startswith("full"):
        full = lambda _, mode: io.FileIO("/dev/full", mode)  # noqa: E731
        monkeypatch.setattr("tabicl_train.outputs.open", full, raising=False)
    result = command("export", f"checkpoint={file}", f"output={tmp_path}/{output}")
    assert result.returncode == 2
    assert re.search(words, result.stderr) and result.stderr.count("\n") == 1
    assert output == "file" or not (tmp_path / output).is_file()


@pytest.mark.parametrize("output", ["m.ckpt", "m"])
def test_an_export_that_computes_something_else_is_not_written(output, made, tmp_path, monkeypatch):
    export(str(made[0]), str(tmp_path / output), "ema")
    other = load_model(str(tmp_path / output))
    monkeypatch.setattr("tabicl_train.weights.export.load_network", lambda path: other)
    with pytest.raises(ConfigError, match=f"{output} is not written: its logits differ from the network's by "):
        export(str(made[0]), str(tmp_path / output))
    monkeypatch.undo()
    assert read_weights(str(tmp_path / output)).origin["weights"] == "ema"
    assert [path.name for path in tmp_path.iterdir()] == [output]


def test_an_export_that_cannot_be_read_back_is_named_by_its_output(file, tmp_path, monkeypatch):
    def refuse(path, content):
        raise ConfigError([f"{path}: 1 weights are missing"])

    source = load_model(str(file))
    for module in ("weights.reader", "prediction.export"):  # the second one reads safetensors, whose name ends in .tmp
        monkeypatch.setattr(f"tabicl_train.{module}.public_weights", refuse)
    pretrained = Pretrained(source.config, source.state_dict())
    for name, format in (("m.ckpt", "tabicl"), ("m.safetensors", "safetensors")):
        with pytest.raises(ConfigError) as caught:
            export_weights(pretrained, f"{tmp_path}/{name}", format)
        assert caught.value.problems == [f"{tmp_path}/{name} is not written: 1 weights are missing"]


@pytest.mark.parametrize("name", ["run", "m.ckpt", "m.safetensors", "m"])
def test_weights_that_are_not_finite_are_read_from_no_format(name, tmp_path, monkeypatch):
    weights = TabICL(TINY).state_dict()
    weights["icl_predictor.ln.weight"][0] = torch.nan
    if name == "run":
        write_untrained_run(tmp_path / name)
        path = tmp_path / name / f"checkpoints/step-{UNTRAINED_STEP:08d}.ckpt"
        content = torch.load(path, weights_only=True)
        content["state_dict"]["model.icl_predictor.ln.weight"][0] = torch.inf
        content["callbacks"]["Averages"]["ema"]["icl_predictor.ln.weight"][0] = torch.nan
        torch.save(content, path)
    elif name == "m":
        save_hub(Pretrained(TINY, weights), tmp_path / name, lambda folder: None)
    else:
        with pytest.raises(ConfigError, match=r"is not written: 1 of .* weights are not finite"):
            save_public(TINY, weights, tmp_path / name)
        monkeypatch.setattr("tabicl_train.weights.pretrained.non_finite", lambda weights: None)
        save_public(TINY, weights, tmp_path / name)
        monkeypatch.undo()
    for kind in ("trained", "ema") if name == "run" else ("trained",):
        with pytest.raises(
            ConfigError, match=r"1 of .* weights are not finite, the first in icl_predictor\.ln\.weight"
        ):
            read_weights(str(tmp_path / name), kind)


def test_weights_whose_logits_are_not_finite_are_not_exported(tmp_path):
    weights = TabICL(TINY).state_dict()
    weights["icl_predictor.ln.weight"].fill_(3e38)
    save_public(TINY, weights, tmp_path / "bad.ckpt")
    with pytest.raises(ConfigError, match="m is not written: the network's logits are not finite"):
        export(str(tmp_path / "bad.ckpt"), str(tmp_path / "m"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.ckpt"]


@pytest.mark.parametrize("output", ["m.ckpt", "m.safetensors", "m"])
def test_an_export_does_not_replace_the_weights_it_reads(output, made, tmp_path):
    exported = tmp_path / output
    export(str(made[0]), str(exported))
    link = (tmp_path / "link").with_suffix(exported.suffix)
    link.symlink_to(exported)
    for other in (exported, link):
        with pytest.raises(ConfigError, match=r"which is the input checkpoint .*; choose another name"):
            export(str(exported), str(other))


@pytest.mark.parametrize(
    ("output", "point", "left"),
    [
        ("m.safetensors", "replace,m.safetensors,0,before", [r"\.m\.safetensors\.\d+\.tabicl-train\.tmp", "hub"]),
        ("hub", "rename,.hub.*,0,before", [r"\.hub\.\d+\.tabicl-train\.old", r"\.hub\.\d+\.tabicl-train\.tmp"]),
        pytest.param("hub", "rename,.hub.*,0,after", [r"\.hub\.\d+\.tabicl-train\.old", "hub"], marks=pytest.mark.slow),
    ],
)
def test_what_a_killed_export_has_left_is_removed_by_the_next_one_beside_it(output, point, left, file, tmp_path):
    export(str(file), str(tmp_path / "hub"))
    killed = forked.start_process(forked.export_and_be_killed, str(file), str(tmp_path / output), point)
    assert forked.wait_for_exit_code(killed) == -signal.SIGKILL
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 and all(map(re.fullmatch, left, names))
    (tmp_path / ".of.1.tmp").touch()  # of another program
    export(str(file), str(tmp_path / "n.ckpt"))
    assert {path.name for path in tmp_path.iterdir()} == {".of.1.tmp", "hub", "n.ckpt"}
    read_weights(tmp_path / "hub")


def test_what_another_process_is_writing_is_not_removed(file, tmp_path):
    def write(opened) -> None:
        export(str(file), str(tmp_path / "n.ckpt"))
        remove_temporary_files(tmp_path)  # as a run that begins
        opened.write(b"whole")

    write_atomically(tmp_path / "m.ckpt", write)
    assert (tmp_path / "m.ckpt").read_bytes() == b"whole"


def test_a_run_without_the_weights_asked_for_is_named(tmp_path):
    write_untrained_run(tmp_path / "run")
    newest = tmp_path / "run/checkpoints" / f"step-{UNTRAINED_STEP:08d}.ckpt"
    with pytest.raises(ConfigError, match="weights=best needs a run directory"):
        read_weights(str(newest), "best")
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"best\.ckpt, the best weights of the run, is missing"):
        read_weights(str(tmp_path / "run"), "best")
    (tmp_path / "run/validation.csv").unlink()
    with pytest.raises(ConfigError, match=r"has no best weights: validation\.every was 0, or"):
        read_weights(str(tmp_path / "run"), "best")
    with pytest.raises(ConfigError, match="weights is 'good'; it must be one of best, newest, ema, trained"):
        read_weights(str(tmp_path / "run"), "good")


def test_damaged_and_foreign_files_are_named(file, tmp_path):
    whole, bad = file.read_bytes(), tmp_path / "bad.ckpt"
    for damaged in (b"", whole[:1000], whole[: len(whole) // 2], b"no torch file"):
        bad.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"bad\.ckpt"):
            read_weights(str(bad))
    unnamed, no_tensor = {"config": {}, "state_dict": {3: torch.ones(2)}}, {"config": {}, "state_dict": {"a": 3}}
    for foreign in (3, torch.ones(2), {}, {"a": 1}, {"state_dict": {}}, unnamed, no_tensor):
        torch.save(foreign, bad)
        with pytest.raises(ConfigError, match=r"bad\.ckpt is not a file of weights"):
            read_weights(str(bad))
    of_others = {"global_step": 3, "state_dict": {}}
    for change in ({}, {"config": 3}, {"config": {}}, {"config": {}, "global_step": "3"}, {"state_dict": []}):
        torch.save(of_others | change, bad)
        with pytest.raises(ConfigError, match=r"bad\.ckpt is not a checkpoint of a run: its? \w+"):
            read_weights(str(bad))
    content = torch.load(file, weights_only=True)
    for change in ({"embed_dim": "16"}, {"col_ssmax": [1]}):
        torch.save(content | {"config": content["config"] | change}, bad)
        with pytest.raises(ConfigError, match=r"bad\.ckpt: (embed_dim='16' is not of type int|col_ssmax=\[1\] is not)"):
            read_weights(str(bad))
    bias = content["state_dict"].pop("row_interactor.out_ln.bias")
    torch.save(content, bad)
    with pytest.raises(ConfigError, match=r"bad\.ckpt: 1 weights are missing, for example row_interactor.out_ln.bias"):
        read_weights(str(bad))
    content["state_dict"] |= {"row_interactor.out_ln.bias": bias[:5], "module.more": bias}
    torch.save(content, bad)
    with pytest.raises(ConfigError) as caught:
        read_weights(str(bad))
    assert [problem.partition(": ")[2].split(",")[0] for problem in caught.value.problems] == [
        "1 weights do not belong to the network",
        "row_interactor.out_ln.bias has shape (5",
    ]


NAME = "icl_predictor.ln.weight"
OTHER_TENSORS = {
    "truth values": (lambda weight: weight > 0, r"has type torch\.bool; the network needs torch\.float32"),
    "integers": (lambda weight: weight.to(torch.int8), r"has type torch\.int8; the network needs torch\.float32"),
    "complex": (lambda weight: weight + 1j, r"has type torch\.complex64; the network needs torch\.float32"),
    "too large": (lambda weight: weight.double() + 1e300, "weights are not finite, the first in"),
    "sparse": (torch.Tensor.to_sparse, "is not a dense tensor with all of its values"),
    "meta": (lambda weight: weight.to("meta"), "is not a dense tensor with all of its values"),
    "expanded": (lambda weight: weight[:1].expand(2**40), "is not a dense tensor with all of its values"),
    "quantized": (
        lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "is not a dense tensor with all of its values|cannot be read|is not a checkpoint",
    ),
}


@pytest.mark.parametrize("kind", OTHER_TENSORS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls them experimental
def test_weights_that_are_other_tensors_than_the_networks_are_refused(kind, file, made, tmp_path):
    change, words = OTHER_TENSORS[kind]
    bad = tmp_path / "bad.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"][NAME] = change(content["state_dict"][NAME])
    torch.save(content, bad)
    with pytest.raises(ConfigError, match=words):
        read_weights(bad)
    for where in ("trained", "ema"):
        content = torch.load(made[0] / f"checkpoints/step-{UNTRAINED_STEP:08d}.ckpt", weights_only=True)
        weights = content["state_dict"] if where == "trained" else content["callbacks"]["Averages"]["ema"]
        name = f"model.{NAME}" if where == "trained" else NAME
        weights[name] = change(weights[name])
        torch.save(content, bad)
        with pytest.raises(ConfigError, match=words):
            read_weights(bad, where)


def test_a_network_with_more_blocks_than_weights_in_its_file_is_not_built(file, tmp_path):
    content = torch.load(file, weights_only=True)
    torch.save(content | {"config": content["config"] | {"icl_num_blocks": 10_000}}, tmp_path / "bad.ckpt")
    export(str(file), str(tmp_path / "hub"))
    text = (tmp_path / "hub/config.json").read_text()
    (tmp_path / "hub/config.json").write_text(text.replace('"col_num_blocks": 1', '"col_num_blocks": 10000'))
    for name in ("bad.ckpt", "hub"):
        with pytest.raises(ConfigError, match=r"its settings do not fit its .* weights: .* more than .* parts"):
            read_weights(tmp_path / name)


def rewritten(source: Path, target: Path, compression: int, repeated: int) -> None:
    """A copy of a zip archive with another compression, and with records that are repeated without their content."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
        for number in range(repeated):
            again = copy.copy(max(new.infolist(), key=lambda record: record.file_size))
            again.filename = again.orig_filename = f"{again.filename}{number}"
            new.filelist.append(again)


@pytest.mark.parametrize(
    ("compression", "repeated", "words"),
    [
        (zipfile.ZIP_DEFLATED, 0, "its records are compressed"),
        (zipfile.ZIP_STORED, 100, "its records are larger than the file"),
    ],
)
def test_a_small_file_that_takes_much_memory_is_refused(compression, repeated, words, tmp_path):
    torch.save({"config": {}, "state_dict": {"a": torch.zeros(1000)}}, tmp_path / "whole.ckpt")
    rewritten(tmp_path / "whole.ckpt", tmp_path / "bad.ckpt", compression, repeated)
    with pytest.raises(ConfigError, match=rf"bad\.ckpt is not a checkpoint: {words}"):
        read_weights(tmp_path / "bad.ckpt")


def nested(depth: int, width: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value] * width
    return value


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("key", "value"),
    [("config", nested(40, 2)), ("origin", nested(40, 2)), ("origin", nested(90, 9)), ("config", nested(150, 1)),
     ("origin", CYCLE)],
    ids=range(5),
)  # fmt: skip
def test_records_in_each_other_are_refused(key, value, file, tmp_path):
    content = torch.load(file, weights_only=True)
    content[key]["versions"] = {"torch": value}
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(ConfigError, match=r"bad\.ckpt is not a checkpoint|bad\.ckpt is damaged"):
        read_weights(tmp_path / "bad.ckpt")


@pytest.mark.parametrize(
    "change",
    [
        {"callbacks": 3},
        {"callbacks": {"Averages": [1]}},
        {"callbacks": {"Averages": {"ema": [1]}}},
        {"run": "x"},
        {"run": {"plugins": 3}},
        {"run": {"command": [1, 2]}},
        {"run": {"command": 1.5}},
        {"run": {"versions": "x"}},
        {"run": {"stream_version": "x"}},
        {"largest_tables": {"smoke": 3}},
        {"largest_tables": {"smoke": {"rows": "x"}}},
        {"inherited_range": {"rows": 1}},
        {"global_step": -1},
        {"global_step": True},
        {"config": {"run_dir": 3}},
        {"config": {"curriculum": {}}},
        {"config": {"curriculum": {"stages": [1]}}},
        {"config": {"curriculum": {"stages": {"smoke": {"steps": "x"}}}}},
        {"config": {"trainer": {}}},
        {"config": {"model": {"max_classes": None}}},
    ],
    ids=str,
)
def test_a_checkpoint_with_records_of_other_types_is_refused_in_one_line(change, made, tmp_path):
    content = torch.load(made[0] / f"checkpoints/step-{UNTRAINED_STEP:08d}.ckpt", weights_only=True)
    if "config" in change:
        change = {"config": content["config"] | change["config"]}
    torch.save(content | change, tmp_path / "bad.ckpt")
    with pytest.raises(ConfigError, match=r"bad\.ckpt") as caught:
        read_weights(tmp_path / "bad.ckpt")
    assert len(str(caught.value).splitlines()) == 1


def test_changed_bits_in_a_safetensors_file_are_noticed(file, tmp_path):
    path = tmp_path / "m.safetensors"
    export(str(file), str(path))
    content = path.read_bytes()
    heads = b'\\"icl_nhead\\": '
    place = content.index(heads) + len(heads)
    other_heads = content[:place] + b"1" + content[place + 1 :]
    for changed in (other_heads, content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=rf"{path} is damaged: its content does not match its checksum"):
            read_weights(str(path))
    path.write_bytes(content.replace(b'"sha256"', b'"sha999"'))  # as one without a checksum, such as those of others
    assert read_weights(str(path)).config == TINY
