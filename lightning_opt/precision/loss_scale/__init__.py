"""Mixed precision in float16 with an adaptive loss scale."""
