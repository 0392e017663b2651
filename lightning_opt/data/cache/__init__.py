"""A bounded cache of dataset items."""
