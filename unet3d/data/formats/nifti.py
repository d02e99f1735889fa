"""NIfTI; unet3d/data/nifti/ reads and writes the files."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import VolumeHeader
from unet3d.data.nifti import reader, stream, writer


class Nifti:
    """Files that end in .nii or .nii.gz."""

    name = "NIfTI"
    suffixes = stream.NIFTI_SUFFIXES

    def __init__(self, read_other_header: Callable[[Path], VolumeHeader]):
        self.read_other_header = read_other_header  # of the other formats, to write labels

    def list_files(self, file: Path) -> list[Path]:
        """Return the file."""
        return [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the header as written."""
        return stream.read_header(file)

    def iter_voxels(self, file: Path, header: VolumeHeader) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the voxels in pieces of at most stream.CHUNK."""
        assert isinstance(header, stream.Header)
        return stream.iter_voxels(file, header)

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Map an uncompressed file, decompress another."""
        return reader.read_volume(file)

    def check_target(self, path: Path, like: Path) -> None:
        """Accept every grid."""

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, classes: Sequence[str]
    ) -> None:
        """Write labels with the header of a NIfTI image, or the affine of another."""
        writer.write_labels(path, labels, self.find_template(like))

    def find_template(self, like: Path) -> Any:
        """Return the image whose header is copied: the file, or one with its grid."""
        if like.name.endswith(self.suffixes):
            return reader.open_image(like)
        header = self.read_other_header(like)
        return writer.make_template(header.shape, header.affine)
