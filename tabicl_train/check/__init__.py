"""Tools to look closely: a step again, tables of a prior, and whether a GPU computes what it should.

Each prints or writes what it finds, and changes no run.
"""
