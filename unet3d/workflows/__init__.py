"""Workflows: one package per command; each combines parts of several packages."""
