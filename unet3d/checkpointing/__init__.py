"""Strategies that make a step cost less memory: each has apply(model)."""
