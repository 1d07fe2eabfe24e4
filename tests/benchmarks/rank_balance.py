"""Prints how much longer the slowest rank computes than the lower bound, in stages 2 and 3 of TabICLv2.

    python tests/benchmarks/rank_balance.py [ranks=8] [steps=2000]

The lower bound of a step is the mean over ranks or the largest single table, whichever is larger, in FLOPs.
"independent" is the ratio if each rank draws its own tables, as in the released trainer; "assigned" is ours.
"""

import sys
from dataclasses import replace

import numpy as np

from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.model import TabICLConfig
from tabicl_train.stream.curriculum import plan_step

args = dict(argument.split("=") for argument in sys.argv[1:])
ranks, steps = int(args.get("ranks", 8)), int(args.get("steps", 2000))
stage2 = StageConfig(steps=steps, rows=[400, 10_240], train_share=[0.79, 0.81], group_size=1)
for name, stage in (("stage 2", stage2), ("stage 3", replace(stage2, rows=[400, 60_000]))):
    assigned, independent = [], []
    for step in range(steps):
        plan = plan_step(CurriculumConfig({"s": stage}), TabICLConfig(), 0, step)
        costs = [group.table_cost for group in plan.groups]
        bound = max(sum(costs) / ranks, max(costs))
        assigned.append(max(sum(group.cost for group in share) for share in plan.assign(ranks)) / bound)
        independent.append(max(sum(costs[rank::ranks]) for rank in range(ranks)) / bound)
    print(f"{name}, {ranks} ranks, {steps} steps: slowest rank over the lower bound, mean (largest): "
          f"assigned {np.mean(assigned):.4f} ({max(assigned):.3f}), "
          f"independent {np.mean(independent):.4f} ({max(independent):.3f})")  # fmt: skip
