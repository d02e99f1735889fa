"""Versions of cuDNN that torch treats differently."""

CUDNN_WITHOUT_CONV3D = range(90_800, 91_500)
"""Versions, from 9.8 to 9.14, that torch does not use for half-precision 3D convolutions."""
