"""Mixed precision in float16 with a loss scale that adapts."""
