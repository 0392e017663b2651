"""Callbacks that act on gradients between the backward pass and the optimizer step."""
