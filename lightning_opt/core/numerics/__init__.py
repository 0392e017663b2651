"""Norms, statistics and other small numerics."""
