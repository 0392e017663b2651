"""What is said, drawn and written."""
