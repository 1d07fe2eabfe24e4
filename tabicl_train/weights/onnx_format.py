"""The ONNX format: a classifier or a regressor with symbolic numbers of tables, rows and columns.

Inputs are tables in the form that the network reads, with standardized columns and without NaN:

X        (tables, rows, columns) float32
y_train  (tables, labeled_rows) int64, labels of the first rows, in 0..classes-1
logits   (tables, rows - labeled_rows, classes) float32, for all classes that the network was trained for; use the
         first C for a table with C classes

For a regressor, y_train is float32, the standardized target, and the output is

quantiles  (tables, rows - labeled_rows, quantiles) float32
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tabicl_train.errors import install, is_installed
from tabicl_train.model.pack import Columns, WithinRows, equal_context
from tabicl_train.model.pack import symbolic_spans as spans
from tabicl_train.model.tabicl import TabICL
from tabicl_train.outputs import write_atomically

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class WithSymbolicSizes(nn.Module):
    """The network's forward pass for tables of equal shape, with symbolic sizes.

    There are B tables with N rows, the first n of which are labeled, and M features in G groups of K; outputs are C
    logits or quantiles.
    """

    def __init__(self, network: TabICL) -> None:
        super().__init__()
        self.network = network

    def forward(self, X: Tensor, y_train: Tensor) -> Tensor:
        """X (B, N, M), y_train (B, n) -> logits or quantiles (B, N - n, C)."""
        column = self.network.col_embedder
        row = self.network.row_interactor
        learner = self.network.icl_predictor
        config = self.network.config
        B, N, _ = X.shape
        n = y_train.shape[1]
        log_n = torch.ones_like(y_train[0], dtype=torch.float32).sum().log()[None]  # (1,); math.log would fix n

        # Columns: the labeled rows are summarized in inducing points, which all rows attend to.
        groups = group_features(X, config.col_grouping, config.group_size)  # (B, G, N, K)
        G = groups.shape[1]
        cells = labeled_rows_first(groups, n)  # (B * G * N, K), labeled rows first
        if config.col_target_aware:
            if config.is_regression:
                marks = torch.stack([y_train, torch.ones_like(y_train)], 2)
            else:
                marks = F.one_hot(y_train, config.max_classes + 1)  # the last entry marks labeled rows
                marks = marks.index_fill(2, torch.tensor([config.max_classes]), 1).float()
            marks = marks[:, None].expand(-1, G, -1, -1)
            marks = torch.cat([marks.flatten(0, 2), marks.new_zeros(B * G * (N - n), marks.shape[-1])])
            cells = torch.cat([cells, marks], 1)
        inducing = config.col_num_inducing
        to_inducing = spans([[B * G, inducing, n, 0, 0]], B * G * inducing, shared=True)
        from_inducing = spans([[B * G, n, inducing, 0, 0], [B * G, N - n, inducing, 0, 0]], B * G * N)
        columns = Columns(B * G * n, log_n, log_n, log_n, to_inducing, from_inducing)
        tokens = column.embed(cells, columns, log_n)  # (B * G * N, E)

        # Rows: the CLS tokens of each row, in front of its features, collect them.
        labeled = tokens[: B * G * n].view(B, G, n, -1)
        queries = tokens[B * G * n :].view(B, G, N - n, -1)
        by_row = torch.cat([labeled, queries], 2).transpose(1, 2)  # (B, N, G, E)
        x = torch.cat([row.cls_tokens.expand(B, N, -1, -1), by_row], 2)  # (B, N, CLS + G, E)
        T = x.shape[2]
        num_cls = config.row_num_cls
        cls = (torch.arange(B * N)[:, None] * T + torch.arange(num_cls)).flatten()
        every = spans([[B * N, T, T, 0, 0]], B * N * T)
        every = every._replace(most_keys=T)
        collecting = spans([[B * N, num_cls, T, 0, 0]], B * N * num_cls)
        position = torch.arange(T).repeat(B * N)
        rows = row.interact(x.flatten(0, 2), WithinRows(every, collecting, position, cls))  # (B * N, D)

        # In-context learning.
        context = equal_context(B, n, N - n)
        predictions = learner(labeled_rows_first(rows.view(B, N, -1), n), y_train.flatten(), context, log_n)
        return predictions.view(B, N - n, -1)


def labeled_rows_first(x: Tensor, n: int) -> Tensor:
    """Flatten x (..., N, K) to (rows, K): the first n rows of every table, then the other rows of every table."""
    return torch.cat([x[..., :n, :].flatten(0, -2), x[..., n:, :].flatten(0, -2)])


def group_features(X: Tensor, grouping: str, size: int) -> Tensor:
    """Group features like `feature_index` in model/stages.py: X (B, N, M) -> (B, G, N, size)."""
    columns = X.transpose(1, 2)  # (B, M, N)
    if grouping == "none":
        return columns.unsqueeze(-1)
    if grouping == "circular":
        return torch.stack([columns.roll(-(2**i), 1) for i in range(size)], -1)
    padded = F.pad(columns, (0, 0, 0, -X.shape[2] % size))
    return padded.unflatten(1, (-1, size)).transpose(2, 3)


def missing_packages() -> list[str]:
    """List the error about missing packages, or nothing."""
    if all(map(is_installed, PACKAGES)):
        return []
    return [f"format=onnx needs {', '.join(PACKAGES)}: {install(' '.join(PACKAGES), 'onnx')}"]


def save_onnx(network: TabICL, path: Path, metadata: dict[str, str], check: Callable[[Path], None]) -> None:
    """Write a network in evaluation mode.

    Parameters
    ----------
    network : TabICL
        The network.
    path : Path
        The file.
    metadata : dict of str to str
        Entries of its metadata.
    check : callable
        Called with the complete temporary file. If it raises, nothing is written.
    """
    # Sizes that stay symbolic. The exporter treats one query row as a case of its own, hence min=4; the file supports
    # any number. It also treats sizes of 1 and equal sizes as fixed, so the example has neither; its values are
    # arbitrary.
    tables, labeled, columns = map(torch.export.Dim, ("tables", "labeled_rows", "columns"))
    rows = torch.export.Dim("rows", min=4)
    regression = network.config.is_regression
    labels = torch.float32 if regression else torch.int64
    example = (torch.zeros(2, 11, 5), torch.zeros(2, 7, dtype=labels))
    logging.disable(logging.WARNING)  # torch's exporter warns about its own code
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                WithSymbolicSizes(network).eval(),
                example,
                dynamo=True,
                dynamic_shapes={"X": {0: tables, 1: rows, 2: columns}, "y_train": {0: tables, 1: labeled}},
                input_names=["X", "y_train"],
                output_names=["quantiles" if regression else "logits"],
                verbose=False,
            )
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None  # always with dynamo
    model = program.model_proto

    # Stack traces name folders of this machine; the other metadata of operations stay.
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if not entry.key.endswith("stack_trace")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    outputs = {"quantiles" if regression else "classes": str(network.config.outputs)}
    for key, value in (metadata | outputs).items():
        model.metadata_props.add(key=key, value=value)

    def write(file: BinaryIO) -> None:
        file.write(model.SerializeToString())
        file.flush()
        check(Path(file.name))

    write_atomically(path, write)


def onnx_predictor(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that predicts with a file in onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def predict(X: Tensor, y_train: Tensor) -> Tensor:
        (outputs,) = session.run(None, {"X": X.numpy(), "y_train": y_train.numpy()})
        return torch.from_numpy(outputs)

    return predict
