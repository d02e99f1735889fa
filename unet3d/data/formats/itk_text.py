"""The text at the start of NRRD and MetaImage files, for what SimpleITK does not say.

SimpleITK names no truncated MetaImage, and it normalizes the axes of NRRD, which rounds them.
"""

import re
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from pathlib import Path
from typing import Protocol

import numpy as np

from unet3d.data.formats.volume_format import MAX_DEFLATE_RATIO, UnreadableFileError

TEXT_BYTES = 2**20
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

META_TEXTS = {
    **dict.fromkeys(("ObjectType", "ObjectSubType"), 15),
    **dict.fromkeys(("Name", "Comment", "ElementDataFile", "AcquisitionDate"), 250),
    **dict.fromkeys(("AnatomicalOrientation", "TransformType", "Modality"), 250),
    **dict.fromkeys(("DistanceUnits", "CompressedData", "BinaryData"), 250),
}
"""Characters of values that MetaIO copies into buffers of 16 or 255."""

SPACES = " \t\n\v\f\r"
"""What C takes for white space."""

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

NRRD_INTS = {"lineskip": range(MAX_SIZE), "byteskip": range(-1, MAX_SIZE)}


class TextHeader(Protocol):
    """The text of one format."""

    end: re.Pattern[bytes]  # after which the voxels begin

    def find_problem(self, text: str) -> str | None:
        """Return what a library could stumble over that trusts the numbers in a text."""
        ...

    def find_data_file(self, text: str) -> str | None:
        """Return the file of the voxels, if it is another."""
        ...

    def count_data_bytes(self, text: str, size: int, itemsize: int) -> int:
        """Return the bytes that `size` bytes of voxels take at least in the file."""
        ...

    def find_unchecked_stream(self, text: str, length: int) -> tuple[int, int] | None:
        """Return start and size of a stream that is read without an error if it is damaged.

        `length` is the size of the text.
        """
        ...

    def parse_affine(self, text: str) -> np.ndarray | None:
        """Return the affine, if the text says it more exactly than SimpleITK."""
        ...

    def write_affine(self, text: str, affine: np.ndarray) -> str:
        """Return a text of SimpleITK with the exact affine."""
        ...


class NrrdText:
    """Lines of `field: value`, up to an empty line."""

    end = re.compile(rb"\n\r?\n")

    def find_problem(self, text: str) -> str | None:
        """Return the line that is odd."""
        fields, problem = self._parse(text)
        dimension = parse_int(fields.get("dimension", ""))
        sizes = [parse_int(word) for word in fields.get("sizes", "").split()]
        if dimension not in DIMENSIONS or len(sizes) != dimension:
            return "dimension and sizes are not those of a volume"
        if fields.get("encoding", "").lower() in ("bzip2", "bz2"):
            return "SimpleITK cannot read bzip2: save it with the encoding gzip"
        return (
            problem
            or find_odd_int(fields, NRRD_INTS)
            or find_odd_size("sizes", sizes)
            or find_many_files(fields.get("datafile", ""))
            or find_control_character(text)
        )

    def find_data_file(self, text: str) -> str | None:
        """Return the file of the voxels, if it is another."""
        return self._parse(text)[0].get("datafile") or None

    def count_data_bytes(self, text: str, size: int, itemsize: int) -> int:
        """Return the size of raw voxels, or the smallest that the encoding can make of them."""
        encoding = self._parse(text)[0].get("encoding", "").lower()
        if encoding in ("gzip", "gz"):
            return size // MAX_DEFLATE_RATIO
        if encoding in ("ascii", "text", "txt"):  # a digit and a space
            return 2 * size // max(itemsize, 1) - 1
        return {"raw": size, "hex": 2 * size}.get(encoding, 0)

    def find_unchecked_stream(self, text: str, length: int) -> tuple[int, int] | None:
        """Return that of gzip: NrrdIO returns the first voxels of a longer one."""
        fields = self._parse(text)[0]
        if fields.get("encoding", "").lower() not in ("gzip", "gz") or {*fields} & {*NRRD_INTS}:
            return None
        return (0 if fields.get("datafile") else length), MAX_SIZE

    def _parse(self, text: str) -> tuple[dict[str, str], str | None]:
        """Return values by names in small letters without spaces, as NrrdIO compares them."""
        lines = text.split("\n")[1:]
        fields = [
            re.sub("[ _]", "", name.lower()) + separator + value
            for name, separator, value in (line.partition(": ") for line in lines)
            if not name.startswith("#") and ":=" not in name  # a user's own values
        ]
        return parse_fields("\n".join(fields), ": ", {})

    def parse_affine(self, text: str) -> np.ndarray | None:
        """Return the axes and the origin as written."""
        fields = self._parse(text)[0]
        signs = NRRD_SIGNS.get(fields.get("space", ""))
        vectors = [
            vector
            for name in ("spacedirections", "spaceorigin")
            for vector in re.findall(VECTOR, fields.get(name, ""))
        ]
        if signs is None or len(vectors) != 4:
            return None
        affine = np.eye(4)
        affine[:3] = np.array(vectors, float).T * np.array(signs)[:, None]
        return affine

    def write_affine(self, text: str, affine: np.ndarray) -> str:
        """Replace the axes and the origin."""
        columns = (affine[:3] * np.array(NRRD_SIGNS["LPS"])[:, None]).T.tolist()
        *axes, origin = (f"({','.join(map(repr, column))})" for column in columns)
        text = re.sub(r"(?m)^space directions:.*$", f"space directions: {' '.join(axes)}", text)
        return re.sub(r"(?m)^space origin:.*$", f"space origin: {origin}", text)


class MetaImageText:
    """Lines of `Field = value`; the voxels' file is the last field."""

    end = re.compile(rb"^[ \t]*ElementDataFile[ \t]*[=:][^\n]*\n", re.MULTILINE)

    def find_problem(self, text: str) -> str | None:
        """Return the field that is odd."""
        fields, problem = self._parse(text)
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
        if is_compressed(fields):
            if parse_int(fields.get("HeaderSize", "")) < 0:
                return "HeaderSize is -1, but the voxels are compressed"
            if self.find_data_file(text) is None and not parse_int(
                fields.get("CompressedDataSize", "")
            ):
                return "CompressedDataSize is missing"
        sizes = [parse_int(word) for word in fields.get("DimSize", "").split()]
        return (
            find_odd_int(fields, META_INTS)
            or find_odd_size("DimSize", sizes)
            or find_many_files(fields.get("ElementDataFile", ""))
            or find_control_character(text)
        )

    def find_data_file(self, text: str) -> str | None:
        """Return the file of the voxels, if it is another."""
        name = self._parse(text)[0].get("ElementDataFile", "")
        return None if name in ("", "LOCAL", "Local", "local", "LIST") else name

    def count_data_bytes(self, text: str, size: int, itemsize: int) -> int:
        """Return the size, compressed if the voxels are."""
        fields = self._parse(text)[0]
        if not is_compressed(fields):
            return size
        return max(parse_int(fields.get("CompressedDataSize", "")), size // MAX_DEFLATE_RATIO)

    def find_unchecked_stream(self, text: str, length: int) -> tuple[int, int] | None:
        """Return that of compressed voxels: MetaIO prints an error and returns what it has."""
        fields = self._parse(text)[0]
        if not is_compressed(fields):
            return None
        size = parse_int(fields.get("CompressedDataSize", ""))
        if not size:  # MetaIO then takes all of the file
            return 0, META_INTS["CompressedDataSize"].stop
        header_size = parse_int(fields.get("HeaderSize", ""))
        return header_size or (length if self.find_data_file(text) is None else 0), size

    def _parse(self, text: str) -> tuple[dict[str, str], str | None]:
        return parse_fields(text, "[=:]", META_TEXTS, last="ElementDataFile")

    def parse_affine(self, text: str) -> np.ndarray | None:
        """Leave it to SimpleITK, which reads the axes as they are written."""
        return None

    def write_affine(self, text: str, affine: np.ndarray) -> str:
        """Leave it as SimpleITK writes it."""
        return text


def is_compressed(fields: Mapping[str, str]) -> bool:
    """Return whether MetaIO decompresses the voxels: it reads the first character."""
    return fields.get("CompressedData", "")[:1] in ("T", "t", "1")


def parse_fields(
    text: str, separator: str, limits: Mapping[str, int], last: str = ""
) -> tuple[dict[str, str], str | None]:
    r"""Return values by field, up to the last one, and a line that libraries read in another way.

    `limits` has the characters of values that libraries read into shorter buffers.

    >>> parse_fields("NDims = 3\nDimSize: 4 5 6\nEnd = x\ny = 1", "[=:]", {}, last="End")
    ({'NDims': '3', 'DimSize': '4 5 6', 'End': 'x'}, None)
    """
    fields: dict[str, str] = {}
    for line in text.split("\n"):
        name, *value = re.split(separator, line, maxsplit=1)
        name = name.strip(SPACES)
        if len(line) > MAX_LINE:
            return fields, f"a line has more than {MAX_LINE:,} characters"
        limit = limits.get(name, MAX_LINE)
        if value and len(value[0].lstrip(SPACES)) > limit:
            return fields, f"{name} has more than {limit} characters"
        if name in fields:
            return fields, f"it has {name[:40]} twice"
        if name and not value:
            return fields, f"the line {name[:40]} has no value"
        if value and not name.startswith("#"):
            fields[name] = value[0].strip(SPACES)
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
    if "%" in name or name.startswith("LIST"):
        return "its voxels are in several files: save them in one"
    return None


def find_control_character(text: str) -> str | None:
    """Return that a character ends a line or a name for a library, but not here."""
    return "a line holds a control character" if re.search("[\r\0]", text) else None


def _is_finite(word: str) -> bool:
    try:
        return isfinite(float(word))
    except ValueError:
        return False


def split_text(file: Path, end: re.Pattern[bytes]) -> tuple[str, int]:
    """Return a file's text and its length in bytes."""
    with file.open("rb") as stream:
        head = stream.read(TEXT_BYTES)
    match = end.search(head)
    if match is None and len(head) == TEXT_BYTES:
        raise UnreadableFileError(f"has no header that ends in its first {TEXT_BYTES:,} bytes")
    length = len(head) if match is None else match.end()
    return head[:length].replace(b"\r\n", b"\n").decode("latin-1"), length
