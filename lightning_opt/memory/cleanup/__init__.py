"""Frees caches and garbage when memory runs low."""
