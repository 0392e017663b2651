"""Memory by category, phase and module, and the live tensors when it runs out."""
