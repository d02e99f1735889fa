"""The training step: its settings, how to build its parts, and what it computes."""
