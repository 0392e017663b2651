"""Reports, verdicts, and values sent to loggers."""
