"""A run after training: the page about it, its figures, and the run as an object with data frames and networks.

Sweeps and comparisons use the same figures.
"""
