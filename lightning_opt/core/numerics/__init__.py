"""Norms, statistics, and other numerics of scalars."""
