"""Gradients accumulated over batches, as the mean over samples or tokens."""
