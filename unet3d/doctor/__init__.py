"""Inspect this machine: what a run finds on it, and how fast and how large its steps are."""
