"""The stream of training tables: which ones a step has, and the processes that draw them ahead of training.

A step depends on its number and the configuration only, so any number of workers, ranks and machines draw the same.
"""
