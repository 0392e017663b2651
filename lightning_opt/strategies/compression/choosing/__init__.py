"""What pays on this network, measured, for ``ddp_compressed``."""
