"""Scores of a network on real data, and comparisons with others and with baselines.

It has the suites of tasks, the metrics, and the statistics that say whether a difference is one.
"""
