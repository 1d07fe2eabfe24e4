"""Tools for a run or a prior that misbehaves: preflight, replay, and the actions of tabicl-prior."""
