"""The memory of tabicl-train, whose process restarts itself with settings of glibc."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tabicl_train.__main__ import MALLOC

SCRIPT = """
import os, resource, sys
from unittest import mock
from tabicl_train.__main__ import main

def train():
    import torch
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**26)  # 256 MB: 128 huge or 65,536 small pages
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(*sys.argv[1:], os.environ["GLIBC_TUNABLES"], faults)

with mock.patch("tabicl_train.commands.train", train), mock.patch("pathlib.Path.exists", return_value=False):
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("given", "keeps"),
    [("", True), ("glibc.rtld.optional_static_tls=2048", True), ("glibc.malloc.check=0", False)],
    ids=["default", "of the loader", "of malloc"],
)
def test_freed_memory_is_used_again_unless_a_user_sets_the_allocator(given, keeps):
    command = [sys.executable, "-c", SCRIPT, "seed=1"]
    text = subprocess.check_output(command, env=os.environ | {"GLIBC_TUNABLES": given}, text=True, timeout=100)
    argument, tunables, faults = text.split()
    assert argument == "seed=1" and tunables.startswith(given)
    assert (tunables != given) == keeps and (int(faults) < 10) == keeps

    loader = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/ld-" in line)
    listed = subprocess.check_output([loader, "--list-tunables"], env={"GLIBC_TUNABLES": tunables}, text=True)
    values = {line.split(": ")[0]: int(line.split()[1], 0) for line in listed.splitlines() if "malloc" in line}
    found = {name: values[f"glibc.malloc.{name}"] for name in MALLOC}
    assert (found == MALLOC) == keeps
