"""Named sets of callbacks and Trainer arguments that suit the machine."""
