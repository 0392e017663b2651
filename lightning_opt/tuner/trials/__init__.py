"""A race of runs against the baseline."""
