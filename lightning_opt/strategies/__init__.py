"""Strategies that send less over the network, and what they are made of."""
