"""What the activations, buffers and caches of a run occupy, and how to need less."""
