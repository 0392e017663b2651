"""A batch trained in parts that fit, with the gradient of the whole."""
