"""The text at the start of NRRD and MetaImage files, for what SimpleITK does not say.

SimpleITK names no truncated MetaImage, and it normalizes the axes of NRRD, which rounds them.
"""

import re
from pathlib import Path
from typing import Protocol

import numpy as np

from unet3d.data.formats.volume_format import MAX_DEFLATE_RATIO

TEXT_BYTES = 2**16
"""Bytes at a file's start that hold its text."""

NUMBER = r"[-+.\w]+"
VECTOR = rf"\(({NUMBER}),({NUMBER}),({NUMBER})\)"

NRRD_SIGNS = {
    "left-posterior-superior": (-1.0, -1.0, 1.0),
    "LPS": (-1.0, -1.0, 1.0),
    "right-anterior-superior": (1.0, 1.0, 1.0),
    "RAS": (1.0, 1.0, 1.0),
}
"""Factors from a space of NRRD to one whose axes point right, forward and up."""


class TextHeader(Protocol):
    """The text of one format."""

    end: bytes  # after which the voxels begin

    def find_data_file(self, text: str) -> str | None:
        """Return the file of the voxels, if it is another."""
        ...

    def count_data_bytes(self, text: str, size: int) -> int:
        """Return the bytes that `size` bytes of voxels take at least in the file."""
        ...

    def parse_affine(self, text: str) -> np.ndarray | None:
        """Return the affine, if the text says it more exactly than SimpleITK."""
        ...

    def write_affine(self, text: str, affine: np.ndarray) -> str:
        """Return a text of SimpleITK with the exact affine."""
        ...


class NrrdText:
    """Lines of `field: value`, up to an empty line."""

    end = b"\n\n"

    def find_data_file(self, text: str) -> str | None:
        """Return the file of the voxels, if it is another."""
        match = re.search(r"^data ?file: *(\S.*)$", text, re.MULTILINE)
        return match and match[1].strip()

    def count_data_bytes(self, text: str, size: int) -> int:
        """Return the size of raw voxels, and the smallest that gzip can make of them."""
        encoding = re.search(r"^encoding: *(\S+)\s*$", text, re.MULTILINE)
        divisors = {"raw": 1, "gzip": MAX_DEFLATE_RATIO, "gz": MAX_DEFLATE_RATIO}
        divisor = divisors.get(encoding[1].lower()) if encoding else None
        return size // divisor if divisor else 0

    def parse_affine(self, text: str) -> np.ndarray | None:
        """Return the axes and the origin as written."""
        space = re.search(r"^space: *(\S+)\s*$", text, re.MULTILINE)
        lines = [
            re.search(rf"^space {field}:(.*)$", text, re.MULTILINE)
            for field in ("directions", "origin")
        ]
        vectors = [v for line in lines if line for v in re.findall(VECTOR, line[1])]
        if space is None or space[1] not in NRRD_SIGNS or len(vectors) != 4:
            return None
        affine = np.eye(4)
        affine[:3] = np.array(vectors, float).T * np.array(NRRD_SIGNS[space[1]])[:, None]
        return affine

    def write_affine(self, text: str, affine: np.ndarray) -> str:
        """Replace the axes and the origin."""
        columns = (affine[:3] * np.array(NRRD_SIGNS["LPS"])[:, None]).T.tolist()
        *axes, origin = (f"({','.join(map(repr, column))})" for column in columns)
        text = re.sub(r"(?m)^space directions:.*$", f"space directions: {' '.join(axes)}", text)
        return re.sub(r"(?m)^space origin:.*$", f"space origin: {origin}", text)


class MetaImageText:
    """Lines of `Field = value`; the voxels' file is the last field."""

    end = b"ElementDataFile = LOCAL\n"

    def find_data_file(self, text: str) -> str | None:
        """Return the file of the voxels, if it is another."""
        match = re.search(r"^ElementDataFile *= *(\S.*)$", text, re.MULTILINE)
        name = match and match[1].strip()
        return None if name in (None, "LOCAL", "LIST") else name

    def count_data_bytes(self, text: str, size: int) -> int:
        """Return the size, compressed if the voxels are."""
        if re.search(r"^CompressedData *= *True", text, re.MULTILINE | re.IGNORECASE) is None:
            return size
        match = re.search(r"^CompressedDataSize *= *(\d+)", text, re.MULTILINE)
        return max(int(match[1]) if match else 0, size // MAX_DEFLATE_RATIO)

    def parse_affine(self, text: str) -> np.ndarray | None:
        """Leave it to SimpleITK, which reads the axes as they are written."""
        return None

    def write_affine(self, text: str, affine: np.ndarray) -> str:
        """Leave it as SimpleITK writes it."""
        return text


def split_text(file: Path, end: bytes) -> tuple[str, int]:
    """Return a file's text and its length in bytes."""
    with file.open("rb") as stream:
        head = stream.read(TEXT_BYTES).replace(b"\r\n", b"\n")
    length = head.find(end) + len(end) if end in head else len(head)
    return head[:length].decode("latin-1"), length
