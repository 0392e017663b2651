"""Tunes data loaders by measurement, logs waits for data, copies batches ahead of time."""
