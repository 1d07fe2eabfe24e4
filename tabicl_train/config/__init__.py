"""The configuration of a run: its schema, and the way from a command line to a checked configuration."""
