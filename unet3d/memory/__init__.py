"""Estimate and measure the memory of a training step."""
