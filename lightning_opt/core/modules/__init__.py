"""Modules, their state, their shards and their batches."""
