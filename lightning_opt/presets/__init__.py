"""Lists of callbacks and Trainer arguments that fit the machine, by name."""
