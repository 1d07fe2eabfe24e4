"""Priors of the experiments: tasks on which rules of attention are compared."""
