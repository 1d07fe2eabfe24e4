"""The memory of tabicl-train, whose process starts itself again with settings of glibc."""

import os
import subprocess
import sys

import pytest

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
    print(os.getpid(), *sys.argv[1:], os.environ["GLIBC_TUNABLES"], faults)

with mock.patch("tabicl_train.commands.train", train):
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("given", "keeps"), [(None, True), ("glibc.malloc.check=0", False)], ids=["default", "given"])
def test_freed_memory_is_used_again_unless_a_user_sets_the_allocator(given, keeps):
    environ = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "seed=1"],
        env=environ | ({"GLIBC_TUNABLES": given} if given else {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, argument, tunables, faults = process.communicate()[0].split()
    assert int(pid) == process.pid and argument == "seed=1"  # signals reach it, with its arguments
    assert (tunables == given) == (not keeps) and (int(faults) < 10) == keeps
