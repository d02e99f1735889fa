"""Images in every format, written by the libraries that users write them with."""

from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import SimpleITK
import tifffile
import zarr
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def turn(*spacing_mm: float) -> np.ndarray:
    """Return an oblique affine."""
    a, b = 0.3, -0.2
    first = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    second = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    affine = np.eye(4)
    affine[:3, :3] = first @ second * spacing_mm
    affine[:3, 3] = -12.25, 40.5, 7.125
    return affine


def write_nifti(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(array, affine), path)
    return path


def write_itk(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    matrix = LPS @ affine
    spacing = np.linalg.norm(matrix[:3, :3], axis=0)
    image = SimpleITK.GetImageFromArray(array.T)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((matrix[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(matrix[:3, 3].tolist())
    SimpleITK.WriteImage(image, str(path))
    return path


def write_tiff(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    """Write a stack as ImageJ does, in micrometers."""
    x, y, z = np.diag(affine)[:3] * 1000
    tifffile.imwrite(
        path,
        np.ascontiguousarray(array.T),
        imagej=True,
        resolution=(1 / x, 1 / y),
        metadata={"axes": "ZYX", "spacing": z, "unit": "um"},
    )
    return path


def write_zarr(
    path: Path, array: np.ndarray, affine: np.ndarray, *, version=3, chunks=(4, 8, 8), **options
) -> Path:
    """Write OME-Zarr 0.4 (zarr 2) or 0.5 (zarr 3) in micrometers; with options of the array."""
    x, y, z = np.diag(affine)[:3] * 1000
    names = "zyx" if array.ndim == 3 else "czyx"
    axes = [
        {"name": n, "type": "channel"}
        if n == "c"
        else {"name": n, "type": "space", "unit": "micrometer"}
        for n in names
    ]
    scale = [1.0, z, y, x][-len(names) :]
    transforms = [{"type": "scale", "scale": scale}]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": transforms}]}
    group = zarr.open_group(path, mode="w", zarr_format=version)
    if version == 3:
        group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    else:
        group.attrs["multiscales"] = [{"version": "0.4", **image}]
    stored = array.transpose(2, 1, 0) if array.ndim == 3 else array.transpose(0, 3, 2, 1)
    chunks = (1, *chunks)[-len(names) :]
    written = group.create_array(
        "0", shape=stored.shape, chunks=chunks, dtype=array.dtype, **options
    )
    written[:] = stored
    return path


def write_numpy(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    np.save(path, array)
    return path


def write_series(
    folder: Path,
    array: np.ndarray,
    affine: np.ndarray,
    *,
    intercept: float = 0,
    series: str | None = None,
    skip: Sequence[int] = (),
    **fields: object,
) -> Path:
    """Write a CT series whose files are not in the order of its slices."""
    folder.mkdir(parents=True, exist_ok=True)
    matrix = LPS @ affine
    spacing = np.linalg.norm(matrix[:3, :3], axis=0)
    axes = matrix[:3, :3] / spacing
    study, frame = generate_uid(), generate_uid()
    series = series or generate_uid()
    for n in range(array.shape[2]):
        if n in skip:
            continue
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        values = {
            "SOPClassUID": CTImageStorage,
            "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
            "Modality": "CT",
            "StudyInstanceUID": study,
            "SeriesInstanceUID": series,
            "FrameOfReferenceUID": frame,
            "PatientID": "1",
            "PatientName": "Doe^Jane",
            "PatientBirthDate": "",
            "PatientSex": "",
            "StudyDate": "20200101",
            "StudyTime": "120000",
            "StudyID": "1",
            "AccessionNumber": "",
            "ReferringPhysicianName": "",
            "SeriesNumber": 1,
            "InstanceNumber": n + 1,
            "PixelSpacing": [to_text(spacing[1]), to_text(spacing[0])],
            "SliceThickness": to_text(spacing[2]),
            "ImageOrientationPatient": [to_text(v) for v in (*axes[:, 0], *axes[:, 1])],
            "ImagePositionPatient": [to_text(v) for v in matrix[:3] @ [0, 0, n, 1]],
            "Rows": array.shape[1],
            "Columns": array.shape[0],
            "SamplesPerPixel": 1,
            "PhotometricInterpretation": "MONOCHROME2",
            "BitsAllocated": 16,
            "BitsStored": 16,
            "HighBit": 15,
            "PixelRepresentation": 1,
            "RescaleSlope": 1,
            "RescaleIntercept": intercept,
            "PixelData": array[:, :, n].T.astype("<i2").tobytes(),
        }
        for key, value in (values | fields).items():
            setattr(data, key, value)
        data.save_as(folder / f"{(7 * n + 3) % 101:03d}", enforce_file_format=True)
    return folder


def to_text(value: float) -> str:
    """Return a number as DICOM holds it, in 16 characters."""
    return pydicom.valuerep.format_number_as_ds(float(value))
