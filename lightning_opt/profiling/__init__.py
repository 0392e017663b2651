"""Where the time and memory of a run go, and an honest comparison of two ways to run."""
