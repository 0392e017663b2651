"""DDP with compressed gradients and error feedback."""
