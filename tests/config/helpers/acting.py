"""Classes that do what none that a config may name does."""

from pathlib import Path

from torch import Tensor, nn


class Writer:
    """Write a file when it is built."""

    def __init__(self):
        Path("written").write_text("x", "utf-8")


class WritingModule(nn.Module):
    """Write a file when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        Path("written").write_text("x", "utf-8")
        return x
