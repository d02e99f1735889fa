"""Pooling kernels for CPUs and GPUs."""
