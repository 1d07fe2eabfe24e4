"""Pretrains TabICL-style tabular in-context learners on synthetic tables."""
