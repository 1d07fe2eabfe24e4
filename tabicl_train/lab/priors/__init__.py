"""Priors of single experiments: tasks on which rules of attention are compared."""
