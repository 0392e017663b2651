"""Where memory goes, by category, phase and module, and what was alive when it ran out."""
