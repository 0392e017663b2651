"""What is done to gradients between the backward pass and the optimizer step."""
