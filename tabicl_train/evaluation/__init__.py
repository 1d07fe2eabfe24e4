"""Scores on real data, beside baselines."""
