"""Which blocks to recompute so that a step meets a memory budget."""
