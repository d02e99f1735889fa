"""Estimate, measure and search the memory of a training step."""
