"""torch.compile for the model or its repeated blocks."""
