"""Settings of the process for the run, put back afterwards."""
