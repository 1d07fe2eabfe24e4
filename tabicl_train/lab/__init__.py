"""The attention laboratory: experiments that write a folder each, with figures, CSV files and a page (README.md).

An experiment is one file of this folder, with a dataclass `Options` and `run(options)`, and a line here.
"""

SEQUENCES = ("linear", "quantifiers")  # whose files lie in sequences/

EXPERIMENTS = {
    "fading": "how much weight one relevant key keeps among more and more others",
    "entropy": "how even the attention of a network is on longer and longer tables",
    "attention": "one row of a table through one attention head, step by step",
    "needle": "which scoring rules still find one matching row among thousands of others",
    "curriculum": "what training on tables of growing lengths does for tables longer than any of them",
    "classes": "how a network of ten classes predicts a thousand, how well and how fast",
    "linear": "whether softmax or SSA still predicts linear functions that are larger than in training",
    "quantifiers": "whether softmax or SSA still tells if all numbers are positive in longer sequences",
}
