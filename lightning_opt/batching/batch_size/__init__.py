"""The batch size that fits, or is fastest, found by trial and followed from epoch to epoch."""
