"""Detects memory that grows from step to step, and the objects that hold it."""
