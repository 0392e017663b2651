"""Garbage collection on a schedule instead of whenever Python starts it."""
