"""Poolings: (kernel_size, stride=None, padding=0), an int or three each, as nn.MaxPool3d."""
