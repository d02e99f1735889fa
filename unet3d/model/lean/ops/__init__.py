"""Operations of lean blocks, in plain PyTorch or by a kernel."""
