"""Tools that look at the tables of a prior: their distributions (describe), pictures (gallery) and speed (bench)."""
