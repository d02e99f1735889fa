"""Labels come back in the scan's own format and on its own grid, exactly."""

from pathlib import Path

import h5py
import highdicom
import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK
import tifffile
import zarr
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

import unet3d as package
from tests.contract.conftest import call

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
SIZE = (14, 16, 12)
STRAIGHT = np.diag([0.75, 0.5, 2.0, 1.0])


def make_oblique():
    a, b = 0.3, -0.2
    first = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    second = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    affine = np.eye(4)
    affine[:3, :3] = first @ second * (0.75, 0.5, 2.0)
    affine[:3, 3] = -12.25, 40.5, 7.125
    return affine


OBLIQUE = make_oblique()


def write_nifti(path, array, affine):
    nibabel.save(nibabel.Nifti1Image(array, affine), path)


def write_itk(path, array, affine):
    matrix = LPS @ affine
    spacing = np.linalg.norm(matrix[:3, :3], axis=0)
    image = SimpleITK.GetImageFromArray(array.T)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((matrix[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(matrix[:3, 3].tolist())
    SimpleITK.WriteImage(image, str(path))


def write_tiff(path, array, affine):
    """Write a stack as ImageJ does, in micrometers."""
    x, y, z = np.diag(affine)[:3] * 1000
    tifffile.imwrite(
        path,
        np.ascontiguousarray(array.T.astype(np.uint16)),
        imagej=True,
        resolution=(1 / x, 1 / y),
        metadata={"axes": "ZYX", "spacing": z, "unit": "um"},
    )


def write_zarr(path, array, affine):
    """Write OME-Zarr 0.5 in micrometers."""
    x, y, z = np.diag(affine)[:3] * 1000
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    transforms = [{"type": "scale", "scale": [z, y, x]}]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": transforms}]}
    group = zarr.open_group(path, mode="w", zarr_format=3)
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    written = group.create_array("0", shape=array.T.shape, chunks=(4, 8, 8), dtype=array.dtype)
    written[:] = array.T


def write_numpy(path, array, affine):
    np.save(path, array)


def write_hdf5(path, array, affine):
    """Write a dataset in micrometers."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("volumes/raw", data=array.T)
        dataset.attrs["element_size_um"] = np.diag(affine)[2::-1] * 1000


def write_series(folder, array, affine):
    """Write a CT series whose files are not in the order of its slices."""
    folder.mkdir()
    matrix = LPS @ affine
    spacing = np.linalg.norm(matrix[:3, :3], axis=0)
    axes = matrix[:3, :3] / spacing

    def to_text(value):
        return pydicom.valuerep.format_number_as_ds(float(value))

    study, series, frame = (generate_uid() for _ in range(3))
    for n in range(array.shape[2]):
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
            "RescaleIntercept": 0,
            "PixelData": array[:, :, n].T.astype("<i2").tobytes(),
        }
        for key, value in values.items():
            setattr(data, key, value)
        data.save_as(folder / f"{(7 * n + 3) % 101:03d}", enforce_file_format=True)


def read_nifti(path):
    image = nibabel.load(path)
    return np.asarray(image.dataobj), image.affine


def read_itk(path):
    image = SimpleITK.ReadImage(str(path))
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return SimpleITK.GetArrayFromImage(image).T, LPS @ affine


UNITS_MM = {"µm": 1e-3, "um": 1e-3, "micrometer": 1e-3, "mm": 1.0, "millimeter": 1.0}


def read_tiff(path):
    with tifffile.TiffFile(path) as file:
        metadata = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        array = file.asarray()
    spacing = [
        metadata[f"PhysicalSize{axis}"] * UNITS_MM[metadata.get(f"PhysicalSize{axis}Unit", "µm")]
        for axis in "XYZ"
    ]
    return array.T, np.diag([*spacing, 1.0])


def read_zarr(path):
    group = zarr.open_group(path, mode="r")
    image = group.attrs["ome"]["multiscales"][0]
    scale = np.ones(3)
    for transform in image["datasets"][0]["coordinateTransformations"]:
        scale = scale * transform["scale"] if transform["type"] == "scale" else scale
    units = [UNITS_MM[axis["unit"]] for axis in image["axes"]]
    spacing = (scale * units)[::-1]
    return group[image["datasets"][0]["path"]][:].T, np.diag([*spacing, 1.0])


def read_numpy(path):
    return np.load(path), np.eye(4)


def read_hdf5(path):
    with h5py.File(path) as file:
        dataset = file["label"]
        spacing = dataset.attrs["element_size_um"][::-1] / 1000
        return dataset[:].T, np.diag([*spacing, 1.0])


def read_seg(path):
    """Read a DICOM SEG whose segment numbers are the labels."""
    segmentation = highdicom.seg.segread(path)
    volume = segmentation.get_volume(combine_segments=True)
    # highdicom has (slice, row, column) in LPS, and sorts slices in its own direction
    affine = LPS @ volume.affine[:, [2, 1, 0, 3]]
    array = volume.array.transpose(2, 1, 0)
    image = nibabel.as_closest_canonical(nibabel.Nifti1Image(array, affine))
    return np.asarray(image.dataobj), image.affine


FORMATS = {
    "nii.gz": (write_nifti, read_nifti, OBLIQUE),
    "nii": (write_nifti, read_nifti, OBLIQUE),
    "nrrd": (write_itk, read_itk, OBLIQUE),
    "mha": (write_itk, read_itk, OBLIQUE),
    "tif": (write_tiff, read_tiff, STRAIGHT),
    "ome.zarr": (write_zarr, read_zarr, STRAIGHT),
    "npy": (write_numpy, read_numpy, np.eye(4)),
    "h5": (write_hdf5, read_hdf5, STRAIGHT),
    "series": (write_series, read_seg, OBLIQUE),
}


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Train a network on voxels of another size than those of the scans."""
    words = [*small, "model.width=4", "model.depth=2", "model.prior_bias=false", "logger=none"]
    folder = tmp_path_factory.mktemp("formats") / "run"
    package.train([*words, "data.spacing_mm=[1.5,1.0,1.5]"], folder=folder)
    return folder


@pytest.fixture(scope="module")
def voxels():
    return np.random.default_rng(0).integers(100, 999, SIZE).astype(np.int16)


@pytest.fixture(scope="module")
def segmenter(run):
    return package.load(run, device="cpu", keep_largest_component=[])


@pytest.mark.parametrize("name", FORMATS)
def test_labels_are_on_the_grid_of_the_scan_in_its_format(name, run, segmenter, voxels, tmp_path):
    write, read, affine = FORMATS[name]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / ("a" if name == "series" else f"a.{name}"), voxels, affine)
    ended = call(
        *("predict", f"checkpoint={run}", f"input={tmp_path / 'in'}", "device=cpu"),
        *(f"output={tmp_path / 'out'}", "keep_largest_component=none"),
    )
    assert ended.code == 0, ended.err
    (written,) = (path for path in (tmp_path / "out").iterdir() if path.name[0] != ".")
    assert written.name == ("a.dcm" if name == "series" else f"a.{name}")
    labels, grid = read(written)
    expected = segmenter.predict(voxels, affine=affine)
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_allclose(grid, affine, rtol=1e-6, atol=1e-6)


def test_a_nifti_scan_gives_its_exact_affine_and_header_to_its_labels(segmenter, voxels, tmp_path):
    for n, affine in enumerate((STRAIGHT, OBLIQUE, np.diag([-0.75, -0.5, 2.0, 1.0]))):
        write_nifti(tmp_path / f"{n}.nii.gz", voxels, affine)
        written = segmenter.predict_file(tmp_path / f"{n}.nii.gz", tmp_path / f"labels{n}.nii.gz")
        scan, labels = nibabel.load(tmp_path / f"{n}.nii.gz"), nibabel.load(written)
        assert labels.get_data_dtype() == np.uint8
        np.testing.assert_array_equal(labels.affine, scan.affine)
        for key in ("pixdim", "sform_code", "qform_code", "xyzt_units"):
            np.testing.assert_array_equal(labels.header[key], scan.header[key])


@pytest.mark.parametrize("axes", ["LPS", "SRA", "AIL"])
def test_stored_orientation_changes_no_label(axes, segmenter, voxels):
    """The same scan stored along other axes has the same labels along these."""
    image = nibabel.Nifti1Image(voxels, STRAIGHT)
    turn = nibabel.orientations.ornt_transform(
        nibabel.io_orientation(STRAIGHT), nibabel.orientations.axcodes2ornt(axes)
    )
    turned = image.as_reoriented(turn)
    labels = nibabel.Nifti1Image(segmenter.predict(voxels, affine=STRAIGHT), STRAIGHT)
    found = segmenter.predict(np.asarray(turned.dataobj), affine=turned.affine)
    np.testing.assert_array_equal(found, np.asarray(labels.as_reoriented(turn).dataobj))


@pytest.mark.parametrize("suffix", ["nrrd", "mha", "nii"])
def test_labels_of_a_series_are_written_in_another_format(suffix, segmenter, voxels, tmp_path):
    write_series(tmp_path / "scan", voxels, OBLIQUE)
    written = segmenter.predict_file(tmp_path / "scan", tmp_path / f"labels.{suffix}")
    labels, affine = FORMATS[suffix][1](written)
    np.testing.assert_array_equal(labels, segmenter.predict(voxels, affine=OBLIQUE))
    np.testing.assert_allclose(affine, OBLIQUE, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("suffix", ["tif", "ome.zarr", "dcm"])
def test_a_format_that_cannot_hold_the_grid_is_refused(suffix, segmenter, voxels, tmp_path):
    write_itk(tmp_path / "a.nrrd", voxels, OBLIQUE)
    with pytest.raises(ValueError, match=r"a\.nrrd"):
        segmenter.predict_file(tmp_path / "a.nrrd", tmp_path / f"labels.{suffix}")
    assert not Path(tmp_path / f"labels.{suffix}").exists()


def test_a_damaged_scan_costs_its_own_labels_alone(unet3d, run, voxels, tmp_path):
    (tmp_path / "in").mkdir()
    write_nifti(tmp_path / "in" / "good.nii.gz", voxels, STRAIGHT)
    (tmp_path / "in" / "bad.nii.gz").write_bytes(b"\x1f\x8b no gzip")
    ended = unet3d("predict", f"checkpoint={run}", "input=in", "output=out", "device=cpu")
    assert ended.code == 1
    assert "bad.nii.gz" in ended.err
    assert (tmp_path / "out" / "good.nii.gz").exists()
    assert not (tmp_path / "out" / "bad.nii.gz").exists()
