"""The text at the start of NRRD and MetaImage files, for what SimpleITK does not say.

SimpleITK names no truncated MetaImage, and it normalizes the axes of NRRD, which rounds them.
"""

import re
from collections.abc import Mapping, Sequence
from math import isfinite, prod
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

MAX_LINE = 1000
"""Characters of a line: libraries read them into buffers of fixed sizes."""

DIMENSIONS = range(2, 5)
MAX_SIZE = 2**31 - 1

META_TYPES = (
    *("MET_CHAR", "MET_UCHAR", "MET_SHORT", "MET_USHORT", "MET_INT", "MET_UINT", "MET_LONG"),
    *("MET_ULONG", "MET_LONG_LONG", "MET_ULONG_LONG", "MET_FLOAT", "MET_DOUBLE"),
)

META_COUNTS = {
    **dict.fromkeys(("DimSize", "ElementSpacing", "ElementSize", "Offset", "Position"), 1),
    **dict.fromkeys(("Origin", "CenterOfRotation"), 1),
    **dict.fromkeys(("TransformMatrix", "Rotation", "Orientation"), 2),
}
"""Fields with a number for each axis (1), or for each pair of axes (2)."""

META_INTS = {
    "ElementNumberOfChannels": range(1, 2**16),
    "HeaderSize": range(-1, MAX_SIZE),
    "CompressedDataSize": range(2**53),
}

NRRD_INTS = {"line skip": range(MAX_SIZE), "byte skip": range(-1, MAX_SIZE)}


class TextHeader(Protocol):
    """The text of one format."""

    end: bytes  # after which the voxels begin

    def find_problem(self, text: str) -> str | None:
        """Return what a library could stumble over that trusts the numbers in a text."""
        ...

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

    def find_problem(self, text: str) -> str | None:
        """Return the line that is odd."""
        lines = [line for line in text.splitlines() if ":=" not in line]  # a user's own values
        fields, problem = parse_fields("\n".join(lines), ":")
        dimension = parse_int(fields.get("dimension", ""))
        sizes = [parse_int(word) for word in fields.get("sizes", "").split()]
        if dimension not in DIMENSIONS or len(sizes) != dimension:
            return "dimension and sizes are not those of a volume"
        return (
            problem
            or find_odd_int(fields, NRRD_INTS)
            or find_odd_size("sizes", sizes)
            or find_many_files(fields.get("data file", fields.get("datafile", "")))
        )

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

    def find_problem(self, text: str) -> str | None:
        """Return the field that is odd."""
        fields, problem = parse_fields(text, "=:", last="ElementDataFile")
        if problem is not None:
            return problem
        dimension = parse_int(fields.get("NDims", ""))
        if dimension not in DIMENSIONS:
            return f"NDims is {fields.get('NDims', 'missing')[:40]}"
        if fields.get("ElementType") not in META_TYPES:
            return f"ElementType is {fields.get('ElementType', 'missing')[:40]}"
        for name, power in META_COUNTS.items():
            numbers = fields[name].split() if name in fields else ["0"] * dimension**power
            if len(numbers) != dimension**power or not all(map(_is_finite, numbers)):
                return f"{name} is not {dimension**power} numbers"
        sizes = [parse_int(word) for word in fields.get("DimSize", "").split()]
        return (
            find_odd_int(fields, META_INTS)
            or find_odd_size("DimSize", sizes)
            or find_many_files(fields.get("ElementDataFile", ""))
        )

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


def parse_fields(text: str, separators: str, last: str = "") -> tuple[dict[str, str], str | None]:
    r"""Return values by field, up to the last one, and a line that is too long or repeats one.

    >>> parse_fields("NDims = 3\nDimSize: 4 5 6\nEnd = x\ny = 1", "=:", last="End")
    ({'NDims': '3', 'DimSize': '4 5 6', 'End': 'x'}, None)
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, *value = (part.strip() for part in re.split(f"[{separators}]", line, maxsplit=1))
        if len(line) > MAX_LINE:
            return fields, f"a line has more than {MAX_LINE:,} characters"
        if name in fields:
            return fields, f"it has {name[:40]} twice"
        if value and not name.startswith("#"):
            fields[name] = value[0]
        if name == last:
            break
    return fields, None


def parse_int(word: str) -> int:
    """Return a number; 0, which no axis has, if it is none.

    >>> parse_int("12"), parse_int("1e3"), parse_int("9" * 5000)
    (12, 0, 0)
    """
    return int(word) if re.fullmatch(r"[-+]?[0-9]{1,18}", word) else 0


def find_odd_int(fields: Mapping[str, str], limits: Mapping[str, range]) -> str | None:
    """Return the first number that is not in its limits."""
    for name, limit in limits.items():
        value = fields.get(name)
        if value is not None and (
            parse_int(value) not in limit or not value.lstrip("+-").isdigit()
        ):
            return f"{name} is {value[:40]}"
    return None


def find_odd_size(name: str, sizes: Sequence[int]) -> str | None:
    """Return that there is no volume of this size."""
    if not sizes or not all(0 < size <= MAX_SIZE for size in sizes) or prod(sizes) > 2**48:
        return f"{name} is {' '.join(map(str, sizes)) or 'missing'}"
    return None


def find_many_files(name: str) -> str | None:
    """Return that the voxels are in several files, whose names C would format."""
    if "%" in name or name.split()[:1] == ["LIST"]:
        return "its voxels are in several files: save them in one"
    return None


def _is_finite(word: str) -> bool:
    try:
        return isfinite(float(word))
    except ValueError:
        return False


def split_text(file: Path, end: bytes) -> tuple[str, int]:
    """Return a file's text and its length in bytes."""
    with file.open("rb") as stream:
        head = stream.read(TEXT_BYTES).replace(b"\r\n", b"\n")
    length = head.find(end) + len(end) if end in head else len(head)
    return head[:length].decode("latin-1"), length
