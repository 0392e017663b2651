"""Lightning from either of its packages, and the base class of callbacks."""
