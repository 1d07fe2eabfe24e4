"""Where the jobs of a sweep run."""
