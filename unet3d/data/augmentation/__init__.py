"""Augment training patches."""
