"""Inputs drawn at random, and the process that each of them is run in."""
