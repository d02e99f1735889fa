"""Estimate and measure what a training step takes of memory."""
