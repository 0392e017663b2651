"""One page that tells what happened in a run."""
