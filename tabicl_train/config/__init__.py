"""The configuration of a run: its schema, and the way from a command line to a checked configuration.

The options of the other commands, and the help that is made of both, are here too.
"""
