"""Runs batches in parts that fit into memory, with the gradient of the whole batch."""
