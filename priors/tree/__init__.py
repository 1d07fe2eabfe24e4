"""Boosted trees of tree_scm."""
