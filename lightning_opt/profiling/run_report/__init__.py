"""Writes one page about a run: findings, pictures, reports and setup."""
