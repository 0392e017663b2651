"""Activation checkpointing by policy, or by a plan for a memory budget."""
