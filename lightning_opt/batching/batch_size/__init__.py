"""Finds batch sizes by trials."""
