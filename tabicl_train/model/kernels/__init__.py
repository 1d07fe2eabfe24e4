"""Kernels that the network's operations choose among; each is imported only where it runs."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
