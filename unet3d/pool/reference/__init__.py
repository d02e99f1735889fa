"""Reference poolings in plain PyTorch; the kernels are tested against them."""
