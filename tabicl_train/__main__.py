"""tabicl-train, also as python -m tabicl_train."""

import os
import sys
from pathlib import Path

# glibc reads these when a process starts, so the command restarts itself with them. Freed memory is kept for the next
# pass, in huge pages (glibc 2.35 or newer): returning it costs 14 % of a step of `demo`. The cache of small blocks is
# off, since cached blocks between two activations keep larger ones from fitting: a run of `demo_long` has 0.70 instead
# of 0.99 GB at step 1,000, and 1.4 instead of 3.0 GB at the end. None of this has been measured on machines with a GPU,
# which keep glibc's defaults.
MALLOC = {"tcache_count": 0, "mmap_max": 0, "trim_threshold": 10**12, "hugetlb": 1}


def main() -> None:
    """Train; without a GPU, in a process with the settings of MALLOC, unless the user has set others."""
    given = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and "glibc.malloc." not in given and not Path("/dev/nvidiactl").exists():
        settings = [f"glibc.malloc.{name}={value}" for name, value in MALLOC.items()]
        os.environ["GLIBC_TUNABLES"] = ":".join([given, *settings]).lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from tabicl_train.cli import train

    train()


if __name__ == "__main__":
    main()
