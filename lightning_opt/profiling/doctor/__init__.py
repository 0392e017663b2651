"""Answers a checklist from the measurements of the callbacks."""
