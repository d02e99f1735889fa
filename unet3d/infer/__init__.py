"""Whole volumes through a network that was trained on patches."""
