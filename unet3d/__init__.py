"""Multiclass 3D U-Nets on volumes, for people whose GPU memory runs out."""

__version__ = "0.1.0"
