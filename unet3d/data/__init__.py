"""Folders on disk -> samples."""
