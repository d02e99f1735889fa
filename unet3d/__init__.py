"""Multiclass 3D U-Nets on volumes, for people whose GPU memory runs out."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "estimate_memory":  # imports torch
        from unet3d.memory.any_network import estimate_memory

        return estimate_memory
    raise AttributeError(f"module 'unet3d' has no attribute {name!r}")
