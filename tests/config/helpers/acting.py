"""A class that does what none that a config may name does."""

from pathlib import Path


class Writer:
    """Write a file when it is built."""

    def __init__(self):
        Path("written").write_text("x", "utf-8")
