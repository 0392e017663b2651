"""Batches: micro-batches, batch sizes and gradient accumulation."""
