"""Reference pooling methods in plain PyTorch; the kernels are tested against them."""
