"""Convolutions in the channels-last memory format."""
