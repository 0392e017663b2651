"""Find vanishing, exploding, dead and NaN gradients by layer, and give advice."""
