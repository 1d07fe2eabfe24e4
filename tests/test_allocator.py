"""Freed memory that a process keeps; in a process of its own, since the setting lasts."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from tabicl_train.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = [faults(), faults()]
assert keep_freed_memory()
print(*before, faults(), faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_is_freed_is_used_again():
    first, second, _, kept = map(int, subprocess.check_output([sys.executable, "-c", SCRIPT], text=True).split())
    assert min(first, second) > 100 and kept < 1000  # 2**26 values are 128 huge or 65,536 small pages
