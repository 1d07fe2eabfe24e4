"""Sweeps: many runs, started, watched and compared."""
