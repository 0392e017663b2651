"""Data: loaders tuned by measurement, copies beside the computation, and a bounded cache."""
