"""Finds the optimisations that pay for a model on a machine, by measuring them."""
