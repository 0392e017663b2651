"""Measurements and numerics that all features share. Imports torch, never Lightning."""
