"""Batches: in parts that fit, and of the size that pays."""
