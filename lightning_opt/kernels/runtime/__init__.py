"""Process settings for the run."""
