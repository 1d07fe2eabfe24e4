"""The ONNX format: the network for a fixed number of classes, with symbolic numbers of tables, rows and columns.

Inputs are tables as the network reads them, with standardized columns and without missing values:

X        (tables, rows, columns) float32
y_train  (tables, labelled_rows) int64, labels in 0..classes-1 of the first rows
logits   (tables, rows - labelled_rows, classes) float32
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from tabicl_train.errors import install, is_installed
from tabicl_train.model.tabicl import TabICL
from tabicl_train.run_dir.atomic import write_atomically

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class WithoutChecks(nn.Module):
    """The network's forward pass without its checks of values, and with the number of labelled rows in a tensor.

    B tables, N rows of which the first n are labelled, M features, C classes.
    """

    def __init__(self, network: TabICL, classes: int) -> None:
        super().__init__()
        self.network, self.classes = network, classes

    def forward(self, X: Tensor, y_train: Tensor) -> Tensor:
        """X (B, N, M), y_train (B, n) -> logits (B, N - n, C)."""
        # log_count takes the logarithm in Python, which would fix n
        log_n = torch.ones_like(y_train[0], dtype=torch.float32).sum().log()[None]  # (1,)
        tokens = self.network.col_embedder(X, y_train, log_n)  # (B, G, N, E)
        rows = self.network.row_interactor(tokens)  # (B, N, D)
        return self.network.icl_predictor(rows, y_train, log_n)[..., : self.classes]


def missing_packages() -> list[str]:
    """The problem that packages are missing, as a list of one or no lines."""
    if all(map(is_installed, PACKAGES)):
        return []
    return [f"format=onnx needs {', '.join(PACKAGES)}: {install(' '.join(PACKAGES), 'onnx')}"]


def save_onnx(
    network: TabICL, path: Path, classes: int, metadata: dict[str, str], check: Callable[[Path], None]
) -> None:
    """Write a network in evaluation mode.

    metadata: for the file's metadata_props
    check: called with the file before it takes its place; what it raises leaves everything as it was
    Raises OSError.
    """
    tables, rows, labelled, columns = map(torch.export.Dim, ("tables", "rows", "labelled_rows", "columns"))
    # The values are arbitrary, but sizes of 1, and equal ones, would be taken for fixed.
    example = torch.zeros(2, 11, 5), torch.zeros(2, 7, dtype=torch.int64)
    with silence():
        program = torch.onnx.export(
            WithoutChecks(network, classes).eval(),
            example,
            dynamo=True,
            dynamic_shapes={"X": {0: tables, 1: rows, 2: columns}, "y_train": {0: tables, 1: labelled}},
            input_names=["X", "y_train"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None  # as it always is with dynamo
    model = program.model_proto
    for key, value in {**metadata, "classes": str(classes)}.items():
        model.metadata_props.add(key=key, value=value)

    def write(file: BinaryIO) -> None:
        file.write(model.SerializeToString())
        file.flush()
        check(Path(file.name))

    write_atomically(path, write)


def onnx_predictor(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """What computes logits with the file of a network, in onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda X, y_train: torch.from_numpy(session.run(None, {"X": X.numpy(), "y_train": y_train.numpy()})[0])


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without the warnings of torch's exporter, which are about its own code."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
