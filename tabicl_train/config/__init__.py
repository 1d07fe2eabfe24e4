"""The configuration of a run: its schema, and how a command line becomes a checked configuration.

The options of the other commands are here too, and the help that is generated from both.
"""
