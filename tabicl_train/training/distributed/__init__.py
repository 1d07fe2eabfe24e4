"""How a run uses several processes: launch by torch's elastic agent, collectives, SLURM.

A run of one process needs of it what says so.
"""
