"""Scores of a network on real data, compared with baselines."""
