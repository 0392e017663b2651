"""Ways to compute the same faster: compile, memory format, fused optimizers, attention, runtime."""
