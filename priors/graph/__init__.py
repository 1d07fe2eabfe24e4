"""Building blocks of graph_scm, the TabICLv2 prior (arXiv 2602.11139, appendix on the prior).

Every random object (weights, matrix, points, activation, function, converter) is a small dataclass: `draw(scalars,
...)` decides its kind and its scalars; calling it, or its `compute`, makes tensors. Node values are feature-major,
(width, N): a column is contiguous, and a row of the table is a column of the matrix.
"""
