"""Measures optimisations on a model and a machine, and selects the ones that pay off."""
