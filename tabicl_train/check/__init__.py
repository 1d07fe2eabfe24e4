"""Tools for a closer look: replays of a step, tables of a prior, and checks of a GPU.

Each prints or writes what it finds. None of them changes a run.
"""
