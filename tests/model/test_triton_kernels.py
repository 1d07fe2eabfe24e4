"""Triton kernels: interpreted, against float64; and compiled for an H100 or H200, without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tabicl_train.model.kernels import row_jit, row_triton, scaling_triton  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOAT32 = {"cos", "sin", "lse", "base", "w1", "b1", "w2", "b2", "moments", "dbase", "dw1", "db1", "dw2", "db2"}
OTHERS = {"starts": "*i32", "segment": "*i32", "scale": "fp32"} | dict.fromkeys(
    ["row0", "tokens", "chunk", "segments"], "i32"
)


@pytest.mark.multi_process
@pytest.mark.parametrize("kernel", ["row", "scaling"])
def test_interpreted_kernels_equal_the_formula(kernel):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("triton_cases.py")
    done = subprocess.run([sys.executable, script, kernel], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


def test_rows_of_a_block_size_share_a_launch():
    runs = torch.tensor([[3, 1], [2, 16], [4, 17], [0, 20], [5, 64], [1, 65], [1, 97], [2, 128]])
    expected = [(0, 5, 16), (5, 4, 32), (9, 5, 64), (14, 1, 96), (15, 3, 128)]
    assert list(row_triton.launches(runs)) == expected
    assert list(row_triton.launches(torch.zeros(0, 2, dtype=torch.int64))) == []
    with pytest.raises(ValueError, match="129 tokens"):
        list(row_triton.launches(torch.tensor([[1, 5], [1, 129]])))


def compiled(kernel, constants, path):
    """The kernel for bf16 queries on sm_90, and its machine code as text."""
    warps = constants.pop("num_warps")
    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else OTHERS.get(name) for name in names}
    signature = {name: kind or ("*fp32" if name in FLOAT32 else "*bf16") for name, kind in kinds.items()}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") and name != "starts"]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},  # as tensors are, and so found at a real launch
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    path.write_bytes(binary.asm["cubin"])
    return binary, subprocess.run([CUOBJDUMP, "-sass", path], capture_output=True, text=True, check=True).stdout


def local_memory(sass):
    """Instructions that store or load registers that did not fit."""
    return sass.count("LDL") + sass.count("STL")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.multi_process
@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton brings no cuobjdump")
@pytest.mark.parametrize("block, queries", [(block, 0) for block in row_triton.BLOCKS] + [(64, 4)])
def test_row_kernels_fit_a_hopper_gpu(block, queries, tmp_path):
    """The released row stage: 8 heads of 16 values."""
    shape = {"C": queries, "INTERLEAVED": False}
    binary, sass = compiled(
        row_jit.forward_kernel, row_triton.options(8, 16, block, backward=False) | shape, tmp_path / "forward"
    )
    assert local_memory(sass) == 0
    assert "HMMA" in sass and "LDG.E.128" in sass and "STG.E.128" in sass
    assert binary.metadata.shared <= 48 * 1024  # four programs on a multiprocessor
    binary, sass = compiled(
        row_jit.backward_kernel, row_triton.options(8, 16, block, backward=True) | shape, tmp_path / "backward"
    )
    assert local_memory(sass) <= (0 if block <= 64 else 40)  # of some 5,000 instructions
    assert "HMMA" in sass and "LDG.E.128" in sass and "STG.E.128" in sass
    assert binary.metadata.shared <= 76 * 1024  # two or more


@pytest.mark.multi_process
@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton brings no cuobjdump")
@pytest.mark.parametrize("d", [16, 64])
def test_scaling_kernels_fit_a_hopper_gpu(d, tmp_path):
    """Released widths: 16 in the column stage, 64 in the in-context stage, gates per element."""
    for backward in (False, True):
        kernel = scaling_triton.backward_kernel if backward else scaling_triton.forward_kernel
        binary, sass = compiled(kernel, scaling_triton.options(8, d, d, d, backward), tmp_path / str(backward))
        assert "MMA" in sass and "LDG.E.128" in sass
        assert binary.metadata.shared <= 227 * 1024
        assert local_memory(sass) <= ((300 if d == 16 else 40) if backward else 0)
