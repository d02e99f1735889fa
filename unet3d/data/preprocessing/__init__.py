"""Preprocess cases and cache the result."""
