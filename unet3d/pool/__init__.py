"""Pooling layers with the arguments of nn.MaxPool3d: kernel_size, stride and padding."""
