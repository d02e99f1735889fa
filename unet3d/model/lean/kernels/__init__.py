"""Kernels of lean blocks for CPUs and GPUs."""
