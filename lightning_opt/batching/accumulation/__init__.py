"""Gradient accumulation that gives the average gradient of one large batch."""
