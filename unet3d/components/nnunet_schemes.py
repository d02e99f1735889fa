"""nnU-Net's names for methods of preprocessing."""

NORMALIZATIONS = {
    "ct": ("CTNormalization", False),
    "zscore": ("ZScoreNormalization", False),
    "zscore_nonzero": ("ZScoreNormalization", True),
    "none": ("NoNormalization", False),
}
"""nnU-Net's scheme, and whether it leaves out what its crop has removed."""
