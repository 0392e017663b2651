"""Measures the memory of activations, buffers and caches, and reduces it."""
