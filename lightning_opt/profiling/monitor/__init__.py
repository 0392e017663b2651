"""Monitors step time, throughput and utilisation, and detects when a run slows down."""
