"""Segment scans with trained networks."""
