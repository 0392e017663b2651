"""What features share that knows Lightning's Trainer."""
