"""Batch sizes: found by trials, and adapted to memory from epoch to epoch."""
