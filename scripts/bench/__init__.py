"""Benchmarks of speed, memory and held-out Dice, whose results are in benchmarks/."""
