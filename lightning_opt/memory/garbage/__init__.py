"""Garbage collection at a chosen step, instead of whenever Python starts it."""
