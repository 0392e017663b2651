"""Functions or trainings timed in turns, with confidence intervals."""
