"""Memory of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

# malloc.h and mman.h
M_TRIM_THRESHOLD, M_MMAP_MAX, MADV_HUGEPAGE = -1, -4, 14
HUGE_PAGE = 2**21
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next pass, in huge pages where possible; returns whether it does."""
    # By default, glibc returns large activations to the system when they are freed, so each pass allocates its memory
    # again: 130,000 page faults in a pass of TabICLv2 over 4 tables of 512 rows and 20 features, and 14 % of a demo
    # step. With it the process never shrinks, so this is for processes that train, after they forked their workers.
    # Tables of many sizes fragment the heap with or without it: a run of width 48 with 60 to 256 rows has 0.88 GB at
    # step 150, 1.19 at 1,000 and 1.41 at 3,000. malloc_trim every 50 steps changes nothing, as the next step allocates
    # the pages again, and a threshold of 1 MB for mmap costs a third of the speed.
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version.restype = ctypes.c_char_p
        libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
        libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.sbrk.argtypes = [ctypes.c_ssize_t]
    except (AttributeError, OSError, TypeError):
        return False
    if not (libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, -1)):
        return False
    # The heap grows in steps that would not inherit the advice, so it is grown once to half of the memory. That uses
    # address space only, which the heap keeps when the block is freed, and is left out where address space is limited.
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY or OVERCOMMIT.read_text().strip() == "2":
        return True
    reserved = libc.malloc(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    if not reserved:
        return True
    start, end = -(-reserved // HUGE_PAGE) * HUGE_PAGE, libc.sbrk(0)
    if start < end:
        libc.madvise(start, (end - start) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)  # refused: small pages remain
    libc.free(reserved)
    return True
