"""Measures the time and memory of a run, and compares configurations."""
