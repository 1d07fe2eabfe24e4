"""Real tables: what their priors offer, and from the columns of any data frame to the numbers that a network reads.

The latter is used by the estimators too; like the rest of `priors`, it knows nothing of networks.
"""

from priors.real.interface import OWN, SYNTHETIC, RealTables, parts, real_tables

__all__ = ["OWN", "SYNTHETIC", "RealTables", "parts", "real_tables"]
