"""Operators of fused blocks, in plain PyTorch or by a kernel."""
