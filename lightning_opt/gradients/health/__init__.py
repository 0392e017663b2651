"""Which gradients vanish, explode, die or are NaN, where, and what to do."""
