"""Robustness tests: corrupted inputs for every command."""
