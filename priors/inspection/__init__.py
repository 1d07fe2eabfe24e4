"""Tools that look at the tables of a prior: their distributions (describe) and pictures (gallery)."""
