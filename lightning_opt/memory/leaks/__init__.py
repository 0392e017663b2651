"""Memory that grows from step to step: what grows, who holds it, which line made it."""
