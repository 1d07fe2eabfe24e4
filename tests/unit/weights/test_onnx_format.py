"""ONNX files: what onnxruntime computes with them, whatever the sizes of the table."""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from networks import draw_batch, forward_batch
from training_runs import write_untrained_run

from tabicl_train import register
from tabicl_train.errors import ConfigError, is_installed
from tabicl_train.weights.export import export
from tabicl_train.weights.onnx_format import PACKAGES, onnx_predictor
from tabicl_train.weights.reader import load_model

# No importorskip: they take a second to import, and most tests that need them are slow.
pytestmark = pytest.mark.skipif(not all(map(is_installed, PACKAGES)), reason=f"needs {', '.join(PACKAGES)}")
NETWORKS = {  # beside tabicl_v2: other scalings and groupings
    "unbounded": ["model.col_scaling=ssmax", "model.icl_scaling=ssmax_mlp", "model.col_grouping=disjoint"],
    "regression": ["model=tabicl_v2_regression", "model.num_quantiles=30"],
    "bounded": [
        "model.col_scaling=ssa_trainable", "model.icl_scaling=ssmax_mlp_elementwise", "model.scaling_bound=3",
        "model.col_grouping=none", "model.bias_free_ln=true", "model.max_classes=7",
    ],
}  # fmt: skip
# Tables, rows, columns, labeled rows. None of them is a size for which the file was made or checked. With 1, 2 and 3
# columns the circular groups wrap around, and 2 labeled rows have log n < 1.
SIZES = [(1, 30, 1, 2), (1, 12, 2, 11), (4, 25, 3, 9), (2, 200, 13, 150), (1, 2, 8, 1)]


def assert_agreement(file: Path, checkpoint: Path) -> None:
    """onnxruntime and torch agree for tables of all sizes, and their logits depend on the rows."""
    network, predict = load_model(str(checkpoint)), onnx_predictor(file)
    for B, N, M, n in SIZES:
        X, y_train, _ = draw_batch(B, N, M, n, classes=network.config.max_classes)
        with torch.no_grad():
            expected = forward_batch(network, X, y_train)
        torch.testing.assert_close(predict(X, y_train), expected, rtol=0, atol=1e-4)
        assert N - n == 1 or expected.std(dim=1).max() > 1e-3


# torch's exporter takes 10 to 17 CPU seconds for the smallest network
@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_onnxruntime_agrees_with_torch(network, tmp_path):
    write_untrained_run(tmp_path / "run", *NETWORKS[network])
    export(str(tmp_path / "run"), str(tmp_path / "m.onnx"))
    assert_agreement(tmp_path / "m.onnx", tmp_path / "run")


@pytest.mark.slow
def test_the_file_names_its_sizes_and_its_origin(tmp_path):
    write_untrained_run(tmp_path / "run", "model=tabicl_v2", "model.icl_num_blocks=1")
    export(str(tmp_path / "run"), str(tmp_path / "m.onnx"), weights="best")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "m.onnx"}  # the weights are in the file
    assert_agreement(tmp_path / "m.onnx", tmp_path / "run/checkpoints/best.ckpt")
    assert str(Path(__file__).parents[3]).encode() not in (tmp_path / "m.onnx").read_bytes()  # a folder of this machine
    import onnx

    model = onnx.load(tmp_path / "m.onnx")
    sizes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert sizes["X"] == ["tables", "rows", "columns"]
    assert sizes["y_train"] == ["tables", "labeled_rows"]
    assert sizes["logits"] == ["tables", "rows - labeled_rows", 10]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    expected = {"run": "run", "step": "5", "weights": "best", "commit": "first", "classes": "10"}
    assert metadata == expected | {"trained_range": "12 to 72 labeled rows, 2 to 6 features, up to 10 classes"}
    with pytest.raises(ConfigError, match="weights cannot be read from a file of this kind"):
        load_model(str(tmp_path / "m.onnx"))


def test_a_full_disk_and_another_result_leave_the_file_as_it_was(tmp_path, monkeypatch):
    import onnx

    write_untrained_run(tmp_path / "run")
    (tmp_path / "m.onnx").write_bytes(b"older")
    program = SimpleNamespace(model_proto=onnx.ModelProto())
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: program)
    with monkeypatch.context() as patch:
        patch.setattr("tabicl_train.outputs.open", lambda _, mode: io.FileIO("/dev/full", mode), raising=False)
        with pytest.raises(ConfigError, match=r"it cannot be written .*No space left on device"):
            export(str(tmp_path / "run"), str(tmp_path / "m.onnx"))
    other = load_model(str(tmp_path / "run"), "newest")
    formats = register.export_format
    onnx_format = dataclasses.replace(formats["onnx"], predictor=lambda _: lambda X, y: forward_batch(other, X, y))
    monkeypatch.setitem(formats._entries, "onnx", onnx_format)
    with pytest.raises(ConfigError, match=r"m\.onnx is not written: its logits differ from the network's by"):
        export(str(tmp_path / "run"), str(tmp_path / "m.onnx"))
    assert (tmp_path / "m.onnx").read_bytes() == b"older"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "m.onnx"}


def test_missing_packages_are_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("tabicl_train.weights.onnx_format.is_installed", lambda package: package != "onnxscript")
    with pytest.raises(ConfigError, match=r"format=onnx needs onnx, onnxscript, onnxruntime: pip install"):
        export("nowhere", str(tmp_path / "m.onnx"))
