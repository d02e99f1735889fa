"""DICOM, by pydicom and highdicom: folders with one series of images of one slice each, and files
of segmentations (SEG) and enhanced images.
"""

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d import __version__
from unet3d.data.formats.volume_format import (
    LPS_TO_RAS,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
)
from unet3d.errors import explain_missing_packages
from unet3d.text import join_first

SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")

CONTOURS = "1.2.840.10008.5.1.4.1.1.481.3"  # RT Structure Set

MULTIFRAME = [
    *SEGMENTATIONS,
    *(f"1.2.840.10008.5.1.4.1.1.{n}" for n in ("2.1", "2.2", "4.1", "4.4", "128.1", "130")),
]
"""Classes of files that hold a whole volume: enhanced images and segmentations."""

PATIENT_AND_STUDY_TAGS = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("AccessionNumber", "StudyID", "StudyDate", "StudyTime"),
)
"""What a segmentation copies of its images; any of them may be empty."""

GEOMETRY_TAGS = ("PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient")
SHARED_TAGS = (
    *("SeriesInstanceUID", "Rows", "Columns", "PixelSpacing"),
    *("SamplesPerPixel", "BitsAllocated", "PixelRepresentation"),
)
"""What is the same in all images of a volume."""

MAX_FIELD_BYTES = 2**10  # of a field that is read with a header
MAX_TURN = 1e-3  # tolerated difference between the components of two orientations
BROKEN = "copy it again, or remove it"
SAME_MM = 1e-3  # distance of slices at one position
PERPENDICULAR = 4e-5  # tolerated 1 - cosine of slices and their normal, for half a degree
GAP_TOLERANCE = 0.02  # tolerated difference between distances of slices, as a fraction of them
HEAD_BYTES = 512  # bytes at a file's start that name its class
MAX_TRIED = 16  # files of a folder that are opened to find out whether it holds a series


@dataclass(frozen=True, kw_only=True)
class SeriesHeader(VolumeHeader):
    """The header of a series, with its images in the order of the slices, without voxels."""

    images: list[tuple[Path, Any]]


class Dicom(VolumeFormat):
    """Folders of images, and files that end in .dcm; arrays are (columns, rows, slices)."""

    name = "DICOM"
    suffixes = (".dcm",)
    packages = ("pydicom", "highdicom")
    cannot_hold = ("tilted slices",)

    def list_files(self, file: Path) -> list[Path]:
        return list_dicom_files(file) if file.is_dir() else [file]

    def read_header(self, file: Path) -> VolumeHeader:
        return read_series_header(file) if file.is_dir() else read_file_header(file)

    def read_voxels(self, file: Path, header: VolumeHeader) -> np.ndarray:
        """Read slice by slice; the label of a segment is its number."""
        if not isinstance(header, SeriesHeader):
            return read_file(file, header)
        volume = np.empty(header.shape[::-1], header.dtype)
        for index, (image, dataset) in enumerate(header.images):
            plane, (slope, intercept) = read_dataset(image).pixel_array, get_scaling(dataset)
            with np.errstate(over="ignore"):  # values beyond float32 become infinite
                volume[index] = plane * slope + intercept if header.dtype.kind == "f" else plane
        return volume.transpose(2, 1, 0)[None]

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write a DICOM SEG with a binary segment for each class, which refers to the images.

        Slices without labels are written too, so that the file has the grid of the images.
        """
        with explain_missing_packages(path, *self.packages):
            import highdicom
            from pydicom.sr.codedict import codes
        logging.getLogger("highdicom").setLevel(logging.WARNING)  # it tells every step
        planes = labels.T  # in the order of the slices
        if like.is_dir():
            sources = [dataset for _, dataset in read_series_header(like).images]
            if sources[0].get("SliceThickness") is None:  # may be empty; highdicom needs a number
                sources[0].SliceThickness = np.linalg.norm(grid.affine[:3, 2])
        else:
            sources = [read_dataset(like, stop_before_pixels=True)]
            frames = sources[0].PerFrameFunctionalGroupsSequence
            positions = [f.PlanePositionSequence[0].ImagePositionPatient for f in frames]
            along = np.array(positions, float) @ (LPS_TO_RAS @ grid.affine)[:3, 2]
            planes = planes[np.argsort(np.argsort(along))]  # in the order of the frames
        for keyword in PATIENT_AND_STUDY_TAGS:
            if keyword not in sources[0]:  # removed, as to make it anonymous
                setattr(sources[0], keyword, "")
        names = list(classes[1:]) or [f"class_{n}" for n in range(1, max(2, int(labels.max()) + 1))]
        with warnings.catch_warnings(action="ignore"):  # about names and dates of the images
            algorithm = highdicom.AlgorithmIdentificationSequence(
                name="unet3d", version=__version__, family=codes.cid7162.ArtificialIntelligence
            )
            segments = [
                highdicom.seg.SegmentDescription(
                    segment_number=number,
                    segment_label=name[:64],
                    segmented_property_category=codes.SCT.Tissue,
                    segmented_property_type=codes.SCT.Tissue,
                    algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
                    algorithm_identification=algorithm,
                )
                for number, name in enumerate(names, start=1)
            ]
            segmentation = highdicom.seg.Segmentation(
                source_images=sources,
                pixel_array=np.ascontiguousarray(planes),
                segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
                segment_descriptions=segments,
                series_instance_uid=highdicom.UID(),
                series_number=1000,
                sop_instance_uid=highdicom.UID(),
                instance_number=1,
                series_description="unet3d",
                omit_empty_frames=False,
                manufacturer="unet3d",
                manufacturer_model_name="unet3d",
                software_versions=__version__,
                device_serial_number="0",
            )
            segmentation.save_as(path)


def is_series(path: Path) -> bool:
    """Return whether a path is a folder with DICOM images of one slice each."""
    if not path.is_dir():
        return False
    try:
        with os.scandir(path) as entries:
            names = sorted(e.name for e in entries if e.name[0] != "." and e.is_file())
        heads = (_read_head(path / name) for name in names[:MAX_TRIED])
        return any(head and not any(uid.encode() in head for uid in MULTIFRAME) for head in heads)
    except OSError:  # such as lost+found, which only root may read
        return False


def list_dicom_files(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder, sorted by name."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name[0] != ".")
    heads = {file: _read_head(file) for file in files if file.name != "DICOMDIR"}
    for file, head in heads.items():
        if head is None and (file.suffix.lower() == ".dcm" or not file.stat().st_size):
            raise UnreadableFileError(f"has {file.name}, which is empty or no DICOM file: {BROKEN}")
    return [file for file, head in heads.items() if head is not None]


def _read_head(file: Path) -> bytes | None:
    """Return a DICOM file's first bytes; None if it is another."""
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    return head if head[128:132] == b"DICM" else None


def read_dataset(file: Path, **options: Any) -> Any:
    """Read a file; values that break the standard are read as they are."""
    import pydicom
    from pydicom.config import IGNORE, settings

    settings.reading_validation_mode = IGNORE
    return pydicom.dcmread(file, **options)


def read_series_header(folder: Path) -> SeriesHeader:
    """Read the headers of the images of a folder, and sort them along the axis of the slices.

    The type is float32 if any slice is scaled. Long private fields are not kept in memory.
    """
    found: dict[tuple[str, ...], list[tuple[Path, Any]]] = {}
    for file in list_dicom_files(folder):
        dataset = read_dataset(file, stop_before_pixels=True, defer_size=MAX_FIELD_BYTES)
        if "Rows" not in dataset:  # a report or a presentation state
            kind = getattr(dataset, "file_meta", {}).get("MediaStorageSOPClassUID")
            if kind is None or kind.name.endswith("Image Storage"):
                raise UnreadableFileError(f"has {file.name}, which is cut off: {BROKEN}")
            continue
        for tag in GEOMETRY_TAGS:
            if not dataset.get(tag):
                raise UnreadableFileError(
                    f"has {file.name} without {tag}: remove it, or if no image has that, convert "
                    "them to another format"
                )
        refuse_inverted(file, dataset)
        key = tuple(str(dataset.get(tag)) for tag in SHARED_TAGS)
        found.setdefault(key, []).append((file, dataset))
    if not found:
        raise UnreadableFileError("holds no DICOM images")
    if len(found) > 1:
        listed = [
            f"{images[0][1].get('SeriesDescription') or images[0][1].get('Modality')} "
            f"({len(images)} images, {images[0][0].name}, ...)"
            for images in found.values()
        ]
        raise UnreadableFileError(
            f"holds {len(found)} series or sizes of images: {join_first(listed)}; give each a "
            "folder of its own"
        )
    (images,) = found.values()
    first = images[0][1]
    orientation = np.array(first.ImageOrientationPatient, float)
    normal = np.cross(orientation[:3], orientation[3:])  # the axis of the slices
    positions = np.array([d.ImagePositionPatient for _, d in images], float)
    order = np.argsort(positions @ normal, kind="stable")
    images, positions = [images[n] for n in order], positions[order]
    check_slices(images, positions, orientation)
    affine = np.eye(4)
    affine[:3, 0] = orientation[:3] * float(first.PixelSpacing[1])
    affine[:3, 1] = orientation[3:] * float(first.PixelSpacing[0])
    affine[:3, 2] = normal * float(first.get("SliceThickness") or 1)
    if len(positions) > 1:
        affine[:3, 2] = (positions[-1] - positions[0]) / (len(positions) - 1)
    affine[:3, 3] = positions[0]
    kind = "i" if first.get("PixelRepresentation") else "u"
    is_scaled = any(get_scaling(dataset) != (1, 0) for _, dataset in images)
    return SeriesHeader(
        shape=(int(first.Columns), int(first.Rows), len(images)),
        affine=LPS_TO_RAS @ affine,
        dtype=np.dtype("f4" if is_scaled else f"{kind}{first.BitsAllocated // 8}"),
        images=images,
    )


def refuse_inverted(file: Path, dataset: Any) -> None:
    """Refuse images whose high values are dark: a network would see a negative."""
    if dataset.get("PhotometricInterpretation") == "MONOCHROME1":
        raise UnreadableFileError(
            f"has inverted gray values (MONOCHROME1) in {file.name}: save it as MONOCHROME2"
        )


def get_scaling(dataset: Any) -> tuple[float, float]:
    """Return slope and intercept of a slice."""
    return float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))


def check_slices(
    images: Sequence[tuple[Path, Any]], positions: np.ndarray, orientation: np.ndarray
) -> None:
    """Refuse slices that are turned, missing, twice at one position, shifted or unevenly apart."""
    for file, dataset in images:
        turn = np.abs(np.array(dataset.ImageOrientationPatient, float) - orientation).max()
        if turn > MAX_TURN:
            raise UnreadableFileError(f"has {file.name} with another orientation: separate the two")
    even = np.linspace(positions[0], positions[-1], len(positions))
    gaps = np.diff(positions @ np.cross(orientation[:3], orientation[3:]))
    if twins := np.flatnonzero(gaps <= SAME_MM).tolist():
        names = " and ".join(file.name for file, _ in images[twins[0] : twins[0] + 2])
        raise UnreadableFileError(f"has {names} at one position: remove copies, or separate phases")
    if len(gaps) < 2:
        return
    usual = float(np.median(gaps))
    drift = np.linalg.norm(positions - even, axis=1).max()
    if max(drift, np.abs(gaps - usual).max()) > GAP_TOLERANCE * usual:
        n = int(np.abs(gaps - usual).argmax())
        raise UnreadableFileError(
            f"has slices {gaps.min():.4g} to {gaps.max():.4g} mm apart, as between "
            f"{images[n][0].name} and {images[n + 1][0].name}: copy those that are missing, "
            "separate phases, or resample it to even distances, into a file of another format"
        )


def open_image(file: Path) -> Any:
    """Return highdicom's image, without voxels."""
    with explain_missing_packages(file, *Dicom.packages):
        import highdicom
    with warnings.catch_warnings(action="ignore"):  # about values that other programs wrote
        dataset = read_dataset(file, stop_before_pixels=True, specific_tags=["NumberOfFrames"])
        if "NumberOfFrames" not in dataset:
            if dataset.file_meta.MediaStorageSOPClassUID == CONTOURS:
                raise UnreadableFileError(
                    "has contours (RTSTRUCT) and no voxels: convert it to NIfTI or a DICOM SEG, as "
                    "the package dcmrtstruct2nii does"
                )
            raise UnreadableFileError("is one slice of a series: give the folder of its series")
        if dataset.file_meta.MediaStorageSOPClassUID in SEGMENTATIONS:
            return highdicom.seg.segread(file)  # bits of frames are read wrongly one by one
        return highdicom.imread(file, lazy_frame_retrieval=True)


def order_axes(volume: Any) -> Any:
    """Turn highdicom's (slices, rows, columns) into the columns, rows and slices of a series."""
    return volume.ensure_handedness("LEFT_HANDED", flip_axis=0).permute_spatial_axes([2, 1, 0])


def read_file_header(file: Path) -> VolumeHeader:
    """Read the geometry of the frames: their order and axes are those of a series."""
    image = open_image(file)
    refuse_inverted(file, image)
    with warnings.catch_warnings(action="ignore"):
        geometry = image.get_volume_geometry(
            allow_missing_positions=True, perpendicular_tol=PERPENDICULAR
        )
    if geometry is None:
        raise UnreadableFileError("has frames that are not the slices of one volume")
    geometry = order_axes(geometry)
    is_segmentation = image.SOPClassUID in SEGMENTATIONS
    segments = image.get("SegmentSequence", ())
    dtype = np.uint8 if len(segments) < 256 else np.uint16
    return VolumeHeader(
        shape=geometry.spatial_shape,
        affine=LPS_TO_RAS @ geometry.affine,
        dtype=np.dtype(dtype if is_segmentation else np.float32),
        may_be_cropped=is_segmentation,
        buffer_bytes=8 * prod(geometry.spatial_shape),
        label_names=tuple((int(s.SegmentNumber), str(s.SegmentLabel)) for s in segments),
    )


def read_file(file: Path, header: VolumeHeader) -> np.ndarray:
    """Return (1, D, H, W); the label of a segment is its number."""
    image = open_image(file)
    with warnings.catch_warnings(action="ignore"):
        if header.may_be_cropped:
            volume = image.get_volume(combine_segments=True, allow_missing_positions=True)
        else:
            volume = image.get_volume()
    if volume.array.ndim != 3:
        raise UnreadableFileError("has colors: it must have one number per voxel")
    return order_axes(volume).array.astype(header.dtype)[None]
