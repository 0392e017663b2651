"""A race of trainings against the baseline."""
