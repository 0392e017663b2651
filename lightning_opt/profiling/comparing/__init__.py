"""Times functions or runs in turns, and computes confidence intervals of their ratios."""
