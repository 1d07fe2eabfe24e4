"""Looking at a prior: distributions, pictures, speed."""
