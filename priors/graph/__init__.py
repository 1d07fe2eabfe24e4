"""Building blocks of graph_scm, the TabICLv2 prior (arXiv 2602.11139, appendix on the prior).

Every random object (weights, matrix, points, activation, function, converter, node) is a small dataclass:
`draw(scalars, ...)` decides its kind and its scalars; calling it, or its `compute`, makes tensors. Node values are
feature-major, (width, N): a column is contiguous, and a row of the table is a column of the matrix.

Loops are compiled by numba, whose import takes a second: priors.graph_scm imports this package when it first draws.
Their signatures are explicit, so another layout is an error and not a recompilation. `key` is a random uint64; a call
makes all its random numbers from the counters that start there (priors/floats.py). A table needs some hundred calls,
most of them small: one takes 1 to 5 us, with numpy 25 to 100 us.
"""
