"""A guard that skips steps with a NaN, an infinity or a spike, backs off, or rolls back."""
