"""Runs in processes of their own that stop and go on at a word."""
