"""Tunes data loaders, logs waits for data, and copies batches ahead of time."""
