"""Benchmarks of speed, memory and Dice, whose results are in benchmarks/."""
