"""How a block is recomputed, and what is kept or packed instead."""
