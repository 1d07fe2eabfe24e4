"""A checksum in the metadata of safetensors files, so that changed bits are noticed when a file is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np

KEY = "sha256"  # in the metadata; older files, and those of other programs, lack it

ReadTensor = Callable[[str], np.ndarray]


def checksum(metadata: Mapping[str, str], names: Iterable[str], read: ReadTensor) -> str:
    """Compute the SHA-256 of the tensors with these names, their types and shapes, and of the other metadata."""
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {KEY}):
        digest.update(json.dumps([key, metadata[key]]).encode())
    for name in sorted(names):
        tensor = read(name)
        digest.update(json.dumps([name, str(tensor.dtype), tensor.shape]).encode())
        digest.update(np.ascontiguousarray(tensor).reshape(-1).data)
    return digest.hexdigest()


def with_checksum(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the metadata of a file of these tensors, with the checksum."""
    return {**metadata, KEY: checksum(metadata, tensors, tensors.__getitem__)}


def is_damaged(metadata: Mapping[str, str], names: Iterable[str], read: ReadTensor) -> bool:
    """Whether a file that has a checksum has other content than when it was written."""
    return KEY in metadata and metadata[KEY] != checksum(metadata, names, read)
