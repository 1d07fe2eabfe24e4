"""The folder of a run: its checkpoints and small files, its lock, and what it says on the terminal."""
