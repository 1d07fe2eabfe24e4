"""Training, from a checked configuration to the last checkpoint: the loop is in loop.py, a step in module.py.

It also has what a step needs (objectives, optimizer, precision), how a run starts and resumes, and what it costs.
"""
