"""torch's attention backends, and blocks that use them."""
