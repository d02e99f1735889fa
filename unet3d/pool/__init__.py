"""Poolings: each takes (kernel_size, stride=None, padding=0), an int or three, as nn.MaxPool3d does."""
