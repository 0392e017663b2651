"""Measurements and small numerics that every feature shares. Imports torch, never Lightning."""
