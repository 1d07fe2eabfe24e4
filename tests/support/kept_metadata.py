"""Keeps what the metadata of installed packages say, for each search path: tests that install a package change it.

A configuration asks four times for entry points, and a network of a plug-in for the package of its module. Each answer
reads the metadata of all packages, which takes 12 and 8 CPU seconds of the tests. This is imported before what imports
these functions by name.
"""

import functools
import importlib.metadata
import sys


@functools.cache
def entry_points_in(path: tuple[str, ...], *, read=importlib.metadata.entry_points, **chosen):
    return read(**chosen)


importlib.metadata.entry_points = lambda **chosen: entry_points_in(tuple(sys.path), **chosen)


@functools.cache
def packages_in(path: tuple[str, ...], *, read=importlib.metadata.packages_distributions):
    return read()


importlib.metadata.packages_distributions = lambda: packages_in(tuple(sys.path))
