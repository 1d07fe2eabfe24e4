"""Filters of graph_scm's finished tables, and the trees that judge them."""
