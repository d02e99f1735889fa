"""DICOM: folders of series, and files of segmentations (SEG) and enhanced images by highdicom."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d import __version__
from unet3d.data.formats.dicom_series import (
    compute_affine,
    get_normal,
    is_series,
    list_dicom_files,
    open_series,
    read_dataset,
)
from unet3d.data.formats.volume_format import (
    UnreadableFileError,
    VolumeHeader,
    describe_read_errors,
)
from unet3d.errors import UsageError, need_packages
from unet3d.files import atomic_write

SUFFIX = ".dcm"

SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")

OF_PATIENT_AND_STUDY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("AccessionNumber", "StudyID", "StudyDate", "StudyTime"),
)
"""What a segmentation copies of its images; any of them may be empty."""


class Dicom:
    """Folders of images, and files that end in .dcm; arrays are (columns, rows, slices)."""

    name = "DICOM"
    suffixes = (SUFFIX,)

    def list_files(self, file: Path) -> list[Path]:
        """Return the files of a series, or the file."""
        return list_dicom_files(file) if file.is_dir() else [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the fields of every slice."""
        return open_series(file).header if file.is_dir() else read_file_header(file)

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read slice by slice; the label of a segment is its number."""
        if not file.is_dir():
            return read_file(file)
        series = open_series(file)
        return series.read(), series.affine

    def check_target(self, path: Path, like: Path, grid: VolumeHeader) -> None:
        """Refuse a volume that is not DICOM: a SEG refers to images."""
        if not (like.name.endswith(SUFFIX) or is_series(like)):
            raise UsageError(
                f"{path} would be a DICOM SEG, which refers to DICOM images, and {like} is none: "
                "set output_format=nii.gz"
            )

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write a DICOM SEG with a binary segment for each class, which refers to the images.

        Slices without labels are written too, so that the file has the grid of the images.
        """
        with need_packages(path, "pydicom", "highdicom"):
            import highdicom
            from pydicom.sr.codedict import codes
        logging.getLogger("highdicom").setLevel(logging.WARNING)  # it tells every step
        planes = labels.T  # in the order of the slices
        if like.name.endswith(SUFFIX):
            sources = [read_dataset(like, stop_before_pixels=True)]
            orientation, positions = _read_positions(sources[0])
            order = np.argsort(positions @ get_normal(orientation))  # of the frames
            planes = planes[np.argsort(order)]
        else:
            series = open_series(like, tags=None)
            sources = series.datasets
            if sources[0].get("SliceThickness") is None:  # may be empty; highdicom needs a number
                sources[0].SliceThickness = np.linalg.norm(series.affine[:3, 2])
        for keyword in OF_PATIENT_AND_STUDY:
            if keyword not in sources[0]:  # removed, as to make it anonymous
                setattr(sources[0], keyword, "")
        names = list(classes[1:]) or [f"class_{n}" for n in range(1, max(2, int(labels.max()) + 1))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names and dates of the images
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
            with atomic_write(path) as draft:
                segmentation.save_as(draft)


def open_image(file: Path) -> tuple[Any, Any]:
    """Return highdicom's image without voxels, and the geometry of its frames."""
    with need_packages(file, "pydicom", "highdicom"):
        import highdicom
    with describe_read_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values that other programs wrote
        dataset = read_dataset(file, stop_before_pixels=True, specific_tags=["NumberOfFrames"])
        if "NumberOfFrames" not in dataset:
            raise UnreadableFileError("is one slice of a series: give the folder of its series")
        if dataset.file_meta.MediaStorageSOPClassUID in SEGMENTATIONS:
            image: Any = highdicom.seg.segread(file, lazy_frame_retrieval=True)
        else:
            image = highdicom.imread(file, lazy_frame_retrieval=True)
        geometry = image.get_volume_geometry(allow_missing_positions=True)
    if geometry is None:
        raise UnreadableFileError("has frames that are not the slices of one volume")
    return image, geometry


def read_file_header(file: Path) -> VolumeHeader:
    """Read the geometry of the frames."""
    image, geometry = open_image(file)
    affine, _ = _orient(image, geometry)
    slices, rows, columns = geometry.spatial_shape
    is_segmentation = image.SOPClassUID in SEGMENTATIONS
    dtype = np.dtype(np.uint8 if len(image.get("SegmentSequence", ())) < 256 else np.uint16)
    return VolumeHeader(
        shape=(columns, rows, slices),
        affine=affine,
        dtype=dtype if is_segmentation else np.dtype(np.float32),
        may_be_cropped=is_segmentation,
        buffer_bytes=8 * slices * rows * columns,
    )


def read_file(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (channels (1, D, H, W), affine); the label of a segment is its number."""
    image, geometry = open_image(file)
    affine, is_flipped = _orient(image, geometry)
    header = read_file_header(file)
    with describe_read_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if header.may_be_cropped:
            volume = image.get_volume(combine_segments=True, allow_missing_positions=True)
        else:
            volume = image.get_volume()
    if volume.array.ndim != 3:
        raise UnreadableFileError("has colors: it must have one number per voxel")
    slices = volume.array[::-1] if is_flipped else volume.array
    return slices.astype(header.dtype).transpose(2, 1, 0)[None], affine


def _orient(image: Any, geometry: Any) -> tuple[np.ndarray, bool]:
    """Return the affine as of a series, and whether highdicom's slices run the other way."""
    orientation, positions = _read_positions(image)
    normal = get_normal(orientation)
    positions = positions[np.argsort(positions @ normal)]
    with describe_read_errors():
        measures = _find_group(image, "PixelMeasuresSequence")
        affine = compute_affine(
            *(orientation, np.array(measures.PixelSpacing, float), positions[0], positions[-1]),
            *(geometry.spatial_shape[0], float(geometry.spacing_between_slices)),
        )
    return affine, bool(geometry.affine[:3, 0] @ normal < 0)


def _read_positions(image: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the axes of the rows and columns, and the position of each frame (N, 3)."""
    with describe_read_errors():
        plane = _find_group(image, "PlaneOrientationSequence")
        frames = image.PerFrameFunctionalGroupsSequence
        positions = [f.PlanePositionSequence[0].ImagePositionPatient for f in frames]
        return np.array(plane.ImageOrientationPatient, float), np.array(positions, float)


def _find_group(image: Any, keyword: str) -> Any:
    """Return what all frames share, or the first frame has."""
    groups = [image.SharedFunctionalGroupsSequence[0], *image.PerFrameFunctionalGroupsSequence]
    return next(group[keyword][0] for group in groups if keyword in group)
