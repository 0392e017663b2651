"""torch's fused optimizers."""
