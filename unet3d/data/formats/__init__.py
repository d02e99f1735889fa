"""Read and write volumes in every format, one module per format; callers use `volumes`."""
