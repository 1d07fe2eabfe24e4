"""Sweeps: many runs, started, watched and compared.

A study of Optuna proposes the settings, and each of its trials is a run directory like any other.
"""
