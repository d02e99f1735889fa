"""Activation checkpointing: strategies with apply(model) that reduce the memory of a step."""
