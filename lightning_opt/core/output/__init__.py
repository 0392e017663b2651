"""Tables, figures, loggers and findings."""
