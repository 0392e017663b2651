"""Training runs in their own processes, which take steps on request."""
