"""The stream of training tables: which ones a step has, and the processes that draw them ahead.

A step needs its number and the configuration only, so that any number of workers, ranks and machines draw the same.
"""
