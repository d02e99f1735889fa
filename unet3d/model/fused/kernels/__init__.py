"""Kernels of fused blocks for CPUs and GPUs."""
