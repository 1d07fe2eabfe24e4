"""The memory of tabicl-train, whose process restarts itself with settings of glibc."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tabicl_train.__main__ import MALLOC

SCRIPT = """
import os, resource, sys
from pathlib import Path
from unittest import mock
from tabicl_train.__main__ import main

def train():
    import numpy as np  # which takes its memory from glibc as torch does, and a tenth of the time to import
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(2**26, np.float32)  # 256 MB: 128 huge or 65,536 small pages
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(*sys.argv[1:], os.environ.get("GLIBC_TUNABLES", ""), faults, sep="|")

has_gpu = mock.patch("pathlib.Path.exists", lambda path: path == Path("/dev/nvidiactl") and sys.argv[1] == "gpu")
with mock.patch("tabicl_train.cli.train", train), has_gpu:
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("machine", "given", "keeps"),
    [
        pytest.param("cpu", "", True, id="default"),
        pytest.param("cpu", "glibc.rtld.optional_static_tls=2048", True, id="of the loader", marks=pytest.mark.slow),
        pytest.param("cpu", "glibc.malloc.check=0", False, id="of malloc", marks=pytest.mark.slow),
        pytest.param("gpu", "", False, id="gpu", marks=pytest.mark.slow),
    ],
)
def test_freed_memory_is_used_again_except_on_gpus_and_with_settings_of_a_user(machine, given, keeps):
    command = [sys.executable, "-c", SCRIPT, machine]
    text = subprocess.check_output(command, env=os.environ | {"GLIBC_TUNABLES": given}, text=True, timeout=100)
    argument, tunables, faults = text.split("|")
    assert argument == machine and tunables.startswith(given)
    assert (tunables != given) == keeps and (int(faults) < 10) == keeps

    loader = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/ld-" in line)
    listed = subprocess.check_output([loader, "--list-tunables"], env={"GLIBC_TUNABLES": tunables}, text=True)
    values = {line.split(": ")[0]: int(line.split()[1], 0) for line in listed.splitlines() if "malloc" in line}
    found = {name: values[f"glibc.malloc.{name}"] for name in MALLOC}
    assert (found == MALLOC) == keeps
