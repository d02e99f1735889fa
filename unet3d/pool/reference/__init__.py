"""Slow poolings in plain PyTorch that the kernels are tested against."""
