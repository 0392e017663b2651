"""Batch sizes found by trials."""
