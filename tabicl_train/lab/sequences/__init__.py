"""The in-context tasks of the SSA paper (arXiv 2508.14685): experiments with transformers over sequences."""
