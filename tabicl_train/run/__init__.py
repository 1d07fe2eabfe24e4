"""The files of a run: checkpoints, records, curves, status and provenance, and what earlier versions wrote.

This package alone reads a run directory, without the libraries that training needs.
"""
