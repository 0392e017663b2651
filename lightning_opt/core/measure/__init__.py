"""Memory, processors and devices: what the machine has and what a run takes of it."""
