"""Fused U-Net blocks: store only raw convolution outputs and work on a few rows at a time."""
