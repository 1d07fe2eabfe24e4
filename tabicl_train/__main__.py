"""tabicl-train, also as python -m tabicl_train."""

import os
import sys

# Read by glibc when a process starts, so the command starts itself again with them. Freed memory is kept, in huge
# pages, as each pass would otherwise allocate its activations again: 14 % of a step of `demo`. Small blocks are not
# cached by thread, since those between two activations keep larger ones from fitting: `demo_long` has 0.70 instead of
# 0.99 GB at step 1,000, and 1.4 instead of 3.0 GB at the end.
TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:\
glibc.malloc.hugetlb=1"


def main() -> None:
    """Train, in a process with glibc's TUNABLES, unless the user has set others."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from tabicl_train.commands import train

    train()


if __name__ == "__main__":
    main()
