"""Keeps the entry points of installed packages, for each search path: tests that install a package change it.

A configuration asks for them four times, and each answer reads the metadata of all packages, which takes 12 CPU seconds
of the tests. This is imported before what imports `entry_points` by name.
"""

import functools
import importlib.metadata
import sys


@functools.cache
def entry_points_in(path: tuple[str, ...], *, read=importlib.metadata.entry_points, **chosen):
    return read(**chosen)


importlib.metadata.entry_points = lambda **chosen: entry_points_in(tuple(sys.path), **chosen)
