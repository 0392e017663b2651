"""Faster kernels for the same computation: compiled, fused, channels-last, better attention."""
