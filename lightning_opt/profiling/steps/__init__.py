"""Measures the time of each phase of a step."""
