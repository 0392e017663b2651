"""Data loading: tuned loaders, copies during computation, and a bounded cache."""
