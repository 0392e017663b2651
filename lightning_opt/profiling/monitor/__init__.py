"""Step time, throughput, utilisation, and when a run became slower."""
