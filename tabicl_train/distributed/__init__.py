"""How a run uses several processes: launch by torch's elastic agent, collectives, SLURM."""
