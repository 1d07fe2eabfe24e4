"""The run directory: its checkpoints and small files, its lock, its status, and summaries of runs."""
