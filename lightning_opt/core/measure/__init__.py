"""Measures the memory, processors and devices of the machine, and their use by a run."""
