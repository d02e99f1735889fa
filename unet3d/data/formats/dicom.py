"""DICOM: a folder with one series of images, or a file with all slices of a volume."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from unet3d.data.formats import dicom_file, dicom_series
from unet3d.data.formats.volume_format import VolumeHeader, iter_slabs


class Dicom:
    """Folders of images, and files that end in .dcm; arrays are (columns, rows, slices)."""

    name = "DICOM"
    suffixes = (dicom_file.SUFFIX,)

    def list_files(self, file: Path) -> list[Path]:
        """Return the files of a series, or the file."""
        return dicom_series.list_dicom_files(file) if file.is_dir() else [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the fields of every slice."""
        if file.is_dir():
            return dicom_series.read_series_header(file)
        return dicom_file.read_file_header(file)

    def iter_voxels(self, file: Path, header: VolumeHeader) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the slices of a series; a file is read as a whole."""
        if not file.is_dir():
            yield from iter_slabs(dicom_file.read_file(file)[0])
            return
        for plane in dicom_series.open_series(file).iter_slices():
            yield 0, plane.astype(np.float32).ravel()

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read slice by slice."""
        if not file.is_dir():
            return dicom_file.read_file(file)
        header = dicom_series.read_series_header(file)
        volume = np.empty(header.shape[::-1], header.dtype)
        for index, plane in enumerate(dicom_series.open_series(file).iter_slices()):
            volume[index] = plane
        return volume.transpose(2, 1, 0)[None], header.affine

    def check_target(self, path: Path, like: Path) -> None:
        """Refuse a volume that is not DICOM."""
        dicom_file.check_source(path, like)

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, classes: Sequence[str]
    ) -> None:
        """Write a DICOM SEG; the volume `like` must be DICOM too."""
        dicom_file.write_segmentation(path, labels, like, classes)
