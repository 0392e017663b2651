"""Gradient accumulation whose average is that of one large batch."""
