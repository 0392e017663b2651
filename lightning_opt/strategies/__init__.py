"""Strategies that send less over the network, and their compressors."""
