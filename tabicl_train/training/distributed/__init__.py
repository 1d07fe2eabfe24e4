"""Several processes in a run: their launch by torch's elastic agent, their collectives, and SLURM.

In a run of one process, the collectives return at once.
"""
