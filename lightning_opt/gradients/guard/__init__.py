"""Steps with a NaN, an infinity or a spike are skipped, backed off from or rolled back."""
