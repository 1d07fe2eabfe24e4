"""The HTML page about a run, and its figures."""
