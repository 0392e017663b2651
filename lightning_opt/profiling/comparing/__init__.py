"""Functions or runs timed in turns, with confidence intervals."""
