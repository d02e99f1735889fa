"""Data augmentation of training patches."""
