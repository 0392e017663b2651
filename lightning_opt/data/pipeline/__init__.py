"""Loaders tuned by measurement, waits for data, copies beside the computation."""
