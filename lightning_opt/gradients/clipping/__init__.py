"""Gradient clipping: the rules, and the callback that applies them."""
