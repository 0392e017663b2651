"""Which optimisations pay for a model on a machine: tried, measured, checked and written down."""
