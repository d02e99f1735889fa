"""`unet3d cut image=... label=... output=...`: cut annotated blocks out of a volume, as cases."""

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import combinations, product
from pathlib import Path
from typing import Annotated

import numpy as np

from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import integer, list_of, read_settings
from unet3d.data.formats.nifti import write_part
from unet3d.data.formats.volume_format import NO_SPACING, StoredVoxels, VolumeHeader
from unet3d.data.formats.volumes import (
    describe_mixed_axes,
    find_offset,
    open_voxels,
    read_header,
    split_suffix,
)
from unet3d.errors import UsageError
from unet3d.files import write_text
from unet3d.text import pluralize
from unet3d.types import Triple

Block = tuple[slice, slice, slice]

COLUMNS = ("x0", "x1", "y0", "y1", "z0", "z1")


@dataclass(frozen=True, kw_only=True)
class CutConfig:
    """What to cut blocks out of, and which."""

    image: Path
    label: Path
    output: Path
    boxes: Path | None
    size: Annotated[Triple, list_of(integer(">= 8"), "three ints of at least 8", length=3)]
    count: Annotated[int | None, integer(">= 1")]  # None: all blocks that are annotated
    gap: Annotated[int, integer(">= 0")]
    ignore_label: Annotated[int | None, integer()]
    seed: Annotated[int, integer(">= 0")]


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write each block's image and labels as NIfTI, and a table of where they are."""
    settings = read_settings(CutConfig, composed.config)
    if settings.ignore_label == 0:
        raise UsageError(
            "ignore_label=0: training reads 0 as background; write 255 where nothing is annotated"
        )
    name, header = split_suffix(settings.image)[0], read_header(settings.image)
    image, label = open_parts(settings.image), open_parts(settings.label)
    other = read_header(settings.label)
    if other.assumption == NO_SPACING and other.shape[:3] == header.shape[:3]:
        other = replace(other, affine=header.affine)
    if other.shape[:3] != header.shape[:3] or find_offset(other, header) != (0, 0, 0):
        raise UsageError(
            f"{settings.label} ({describe_grid(other)}) is not on the grid of {settings.image} "
            f"({describe_grid(header)})"
        )
    if mixed := describe_mixed_axes(settings.image, settings.label):
        print(f"warning: {mixed}: labels are wrong if they are transposed", file=sys.stderr)
    if existing := sorted(settings.output.glob(f"*/{escape(name)}_[0-9][0-9][0-9]*.nii.gz")):
        raise UsageError(f"{existing[0]} exists: name another output, or remove {name}'s blocks")
    rows = []
    for block in find_blocks(settings, label):
        case = f"{name}_{len(rows):03d}"
        write_part(settings.output / "images" / f"{case}.nii.gz", image, header, block)
        write_part(settings.output / "labels" / f"{case}.nii.gz", label, other, block)
        rows.append([case, *(end for side in block for end in (side.start, side.stop))])
    if not rows:
        raise UsageError(
            f"no block of {settings.label} is annotated: choose another size, or ignore_label="
        )
    table = settings.output / "boxes.csv"
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerows(rows if table.exists() else [["case", *COLUMNS], *rows])
    write_text(table, (table.read_text("utf-8") if table.exists() else "") + written.getvalue())
    print(f"{pluralize(len(rows), 'block')} of {settings.image} in {settings.output}")
    words = ["data=pairs", f"data.root={settings.output}", "data.label_values=auto"]
    if (channels := image.shape[0]) > 1:
        words.append(f"data.channels=[{','.join(f'channel_{n}' for n in range(channels))}]")
    if settings.ignore_label is not None:
        words.append(f"data.ignore_label={settings.ignore_label}")
    print("next: unet3d check", *words)
    return 0


def describe_grid(header: VolumeHeader) -> str:
    """Say how large a grid is, and where it is."""
    spacing, origin = (
        " x ".join(f"{n:g}" for n in mm) for mm in (header.spacing_mm, header.affine[:3, 3])
    )
    shape = " x ".join(map(str, header.shape[:3]))
    return f"{shape} voxels of {spacing} mm from {origin}, axes {header.orientation}"


def open_parts(file: Path) -> StoredVoxels:
    """Open a file whose parts can be read."""
    if (voxels := open_voxels(file)) is None:
        raise UsageError(
            f"{file} cannot be read by parts (its format, compression or scaled values): convert "
            "it to OME-Zarr, or to .npy"
        )
    return voxels


def find_blocks(settings: CutConfig, label: StoredVoxels) -> Iterator[Block]:
    """Yield the boxes of the file, or annotated blocks in random order."""
    shape = label.shape[1:]
    if settings.boxes is not None:
        yield from read_boxes(settings.boxes, shape, split_suffix(settings.image)[0])
        return
    sides = [
        list_sides(side, size, settings.gap)
        for side, size in zip(settings.size, shape, strict=True)
    ]
    blocks, found = list(product(*sides)), 0
    for n in np.random.default_rng(settings.seed).permutation(len(blocks)):
        x, y, z = blocks[n]
        values = label.read((x, y, z))
        unlabeled = 0 if settings.ignore_label is None else settings.ignore_label
        if (values != unlabeled).any():
            found += 1
            yield x, y, z
        if found == settings.count:
            return


def list_sides(side: int, size: int, gap: int) -> list[slice]:
    """Divide an axis; what is left at its end is a block from half the size on.

    >>> list_sides(16, 60, 4), list_sides(16, 9, 4)
    ([slice(0, 16, None), slice(20, 36, None), slice(40, 56, None)], [slice(0, 9, None)])
    >>> list_sides(16, 28, 4)
    [slice(0, 16, None), slice(20, 28, None)]
    """
    starts = range(0, size, side + gap)
    spans = [slice(start, min(start + side, size)) for start in starts]
    return [span for span in spans if not span.start or span.stop - span.start >= side / 2]


def read_boxes(file: Path, shape: Sequence[int], name: str) -> list[Block]:
    """Return the boxes of a table with the columns x0, x1, y0, y1, z0 and z1.

    Where cases are those of `cut`, only boxes of the volume of this name are meant. Warn of the
    first two that overlap.
    """
    try:
        lines = file.read_text("utf-8-sig").splitlines()
        rows = [*csv.DictReader(lines, skipinitialspace=True)]
        if any(None in row for row in rows):
            raise ValueError("a row has more values than columns")
        own = [
            row for row in rows if re.fullmatch(rf"{re.escape(name)}_\d+", row.get("case") or "")
        ]
        table = [[int(row[column]) for column in COLUMNS] for row in own or rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"boxes={file} must have columns {','.join(COLUMNS)}, divided by commas, with whole "
            f"numbers: {'no column ' * isinstance(error, KeyError)}{error}"
        ) from None
    if not table:
        raise UsageError(f"boxes={file} lists no box")
    boxes = list[Block]()
    for row in table:
        pairs = [*zip(row[::2], row[1::2], strict=True)]
        if any(not 0 <= first < end <= n for (first, end), n in zip(pairs, shape, strict=True)):
            raise UsageError(f"{file}: {row} is not within {tuple(shape)} voxels")
        x, y, z = (slice(*pair) for pair in pairs)
        boxes.append((x, y, z))
    for (m, a), (n, b) in combinations(enumerate(boxes, 1), 2):
        if all(s.start < t.stop and t.start < s.stop for s, t in zip(a, b, strict=True)):
            print(
                f"warning: boxes {m} and {n} of {file} overlap, and perhaps others: divide the "
                "cases by data.splits=, or validation may see what training has seen",
                file=sys.stderr,
            )
            break
    return boxes
