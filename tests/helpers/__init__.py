"""Shared by the tests: quiet Trainers, small models, footprints, sync counters, process groups."""
