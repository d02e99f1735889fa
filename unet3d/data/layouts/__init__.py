"""Layouts of datasets, and what they share: splits, scans to segment, downloads."""
