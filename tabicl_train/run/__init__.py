"""The files of a run: checkpoints, records, curves, status and provenance, and what earlier versions wrote.

Whoever has a run directory can read it with this room alone, without the libraries that train.
"""
