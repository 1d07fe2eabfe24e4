"""What watches or keeps a run, one behavior per file; each can be removed without breaking the training step.

build.py lists them in the order of their calls.
"""
