"""What a message holds: selected or quantised values, packed."""
