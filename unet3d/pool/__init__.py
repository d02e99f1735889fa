"""Poolings: each takes (kernel_size, stride=None, padding=0), as nn.MaxPool3d does."""
