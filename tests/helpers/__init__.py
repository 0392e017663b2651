"""What the tests share: quiet Trainers, small models, footprints, syncs and real processes."""
