"""tabicl-gpu-check: whether a GPU computes what it should, how fast, and with how much memory.

The tests that need a GPU call the same checks.
"""
