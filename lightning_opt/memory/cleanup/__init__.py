"""Caches and garbage given back when memory runs short."""
