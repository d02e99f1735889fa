"""Volumes in every format with one part that is not as programs write it, and gzip bombs."""

import gzip
import io
import json
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
from hypothesis import strategies as st
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.multival import MultiValue
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from scripts.robustness.fuzzing.isolation import Input
from scripts.robustness.fuzzing.mutations import (
    FLOATS,
    NUMBERS,
    TEXTS,
    change_lines,
    change_value,
    corrupt,
)
from unet3d.data.formats.volumes import read_volume, write_labels

SAMPLES = "samples"
"""Folder of a volume in each format, with the same values."""

NIFTI_FIELDS = (
    *("dim", "dim", "dim", "datatype", "bitpix", "pixdim", "vox_offset", "scl_slope", "scl_inter"),
    *("qform_code", "sform_code", "quatern_b", "qoffset_x", "srow_x", "srow_y", "magic"),
    *("sizeof_hdr", "xyzt_units", "intent_code", "slice_end", "descrip", "aux_file"),
)

DICOM_FIELDS = (
    *("Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("SamplesPerPixel", "PixelSpacing", "SliceThickness", "ImageOrientationPatient"),
    *("ImagePositionPatient", "RescaleSlope", "RescaleIntercept", "PhotometricInterpretation"),
    *("NumberOfFrames", "SeriesInstanceUID", "SOPInstanceUID", "SOPClassUID", "InstanceNumber"),
    *("PixelData", "Modality", "FrameOfReferenceUID", "PatientID", "StudyDate"),
)

BOMB_MIB = 16
"""Size of the zeros in a gzip bomb: scored within the time limit, where they are a volume."""

BOMB_SLICES = 4 * BOMB_MIB
"""Slices of 512 x 512 voxels that the zeros suffice for."""

CHUNK_BOMB_BYTES = 2**31
ZSTD_BLOCK_BYTES = 2**17

PREDICT_GIB = 0.25
"""RAM that predict may take: a bomb that is a volume needs more, and hours of tiny windows."""


def write_samples(folder: Path) -> None:
    """Write the scan of the valid inputs in every format."""
    image, samples = folder / "scans" / "a.nii.gz", folder / SAMPLES
    values = read_volume(image)[0][0]
    labels = np.clip(values * 50, 0, 255).astype(np.uint8)
    for suffix in (".nii", ".nii.gz", ".nrrd", ".mha", ".tif", ".ome.zarr", ".npy"):
        (samples / suffix).mkdir(parents=True)
        write_labels(samples / suffix / f"a{suffix}", labels, image)
    two = nibabel.Nifti2Image(values.astype(np.int16), np.eye(4))
    (samples / "nifti2").mkdir()
    nibabel.save(two, samples / "nifti2" / "a.nii")
    _write_series(samples / "dicom" / "a", labels)


def _write_series(folder: Path, values: np.ndarray) -> None:
    folder.mkdir(parents=True)
    study, series, frame = generate_uid(), generate_uid(), generate_uid()
    for n in range(values.shape[2]):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data = FileDataset(None, {}, file_meta=meta, preamble=bytes(128))  # ty: ignore
        data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        data.StudyInstanceUID, data.SeriesInstanceUID = study, series
        data.FrameOfReferenceUID, data.Modality, data.PatientID = frame, "CT", "1"
        data.PatientName, data.StudyDate, data.InstanceNumber = "x", "20200101", n + 1
        data.PixelSpacing, data.SliceThickness = [1, 1], 2
        data.ImageOrientationPatient, data.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, 2 * n]
        data.Rows, data.Columns, data.SamplesPerPixel = values.shape[1], values.shape[0], 1
        data.PhotometricInterpretation, data.PixelRepresentation = "MONOCHROME2", 1
        data.BitsAllocated, data.BitsStored, data.HighBit = 16, 16, 15
        data.RescaleSlope, data.RescaleIntercept = 1, 0
        data.PixelData = values[:, :, n].T.astype("<i2").tobytes()
        data.save_as(folder / f"{n:03d}", enforce_file_format=True)


@st.composite
def change_nifti(draw: st.DrawFn, content: bytes) -> bytes:
    """Change fields of an uncompressed file's header."""
    is_second = int.from_bytes(content[:4], "little") == 540
    kind = nibabel.Nifti2Header if is_second else nibabel.Nifti1Header
    size = 540 if is_second else 348
    header = kind(content[:size], check=False)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(NIFTI_FIELDS))
        values = header[name]
        kinds = {"f": st.sampled_from(FLOATS), "S": st.binary(max_size=80)}
        wide = st.one_of(st.sampled_from(NUMBERS), st.integers(0, 20))
        drawn = draw(kinds.get(values.dtype.kind, wide))
        with np.errstate(all="ignore"):
            if values.dtype.kind in "iu":
                bits = 8 * values.dtype.itemsize
                drawn = np.array(drawn % 2**bits, f"u{values.dtype.itemsize}").view(
                    values.dtype.newbyteorder("=")
                )
            if values.ndim:
                changed = np.array(values)
                where = draw(st.integers(0, changed.size - 1))
                changed[where if draw(st.booleans()) else slice(None)] = drawn
                drawn = changed
            header[name] = drawn
    return header.binaryblock + content[size:]


@cache
def make_bomb(declared: int) -> bytes:
    """Compress zeros behind a header that declares another number of voxels."""
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape((512, 512, declared))
    header["vox_offset"], header["magic"] = 352, b"n+1"
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(header.binaryblock + bytes(4))]
    parts += [packer.compress(bytes(2**20)) for _ in range(BOMB_MIB)]
    return b"".join([*parts, packer.flush()])


@st.composite
def change_gzip(draw: st.DrawFn, content: bytes) -> bytes:
    """Change what is compressed, the compressed stream, or both."""
    match draw(st.integers(0, 9)):
        case 0:
            return make_bomb(
                draw(st.sampled_from((1, BOMB_SLICES - 1, BOMB_SLICES, BOMB_SLICES + 1, 32767)))
            )
        case 1 | 2:
            return draw(corrupt(content))
        case 3:
            return content + draw(st.sampled_from((b"\0", b"x" * 99, content, make_bomb(1))))
        case 4:
            return gzip.compress(draw(corrupt(gzip.decompress(content))), 1)
    return gzip.compress(draw(change_nifti(gzip.decompress(content))), 1)


@st.composite
def change_text_header(draw: st.DrawFn, content: bytes, end: bytes) -> bytes:
    """Change lines in front of the voxels."""
    head, found, voxels = content.partition(end)
    changed = draw(change_lines(head.decode("latin-1"))).encode("utf-8", "replace")
    return changed.rstrip(b"\n") + found + voxels if draw(st.integers(0, 9)) else changed


@st.composite
def change_numpy(draw: st.DrawFn, content: bytes) -> bytes:
    """Change the header of a .npy file."""
    size = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + size].decode("latin-1")
    values = st.sampled_from((*map(str, NUMBERS), "'O'", "'<f16'", "'<U9'", "()", "[1]", "None"))
    old = draw(st.sampled_from(("|u1", "False", "12", "10", "8", "(", "descr", "}", "'")))
    changed = header.replace(old, draw(values), 1).encode("latin-1")
    length = draw(st.sampled_from((len(changed), len(changed), size, 0, 65535)))
    return content[:8] + length.to_bytes(2, "little") + changed + content[10 + size :]


@st.composite
def change_dicom(draw: st.DrawFn, content: bytes) -> bytes:
    """Change elements of a DICOM file."""
    data = pydicom.dcmread(io.BytesIO(content))
    name = draw(st.sampled_from(DICOM_FIELDS))
    values = st.one_of(st.sampled_from((*NUMBERS, *FLOATS, *TEXTS)), st.integers(0, 20))
    try:
        if draw(st.integers(0, 4)) == 0:
            delattr(data, name)
        elif name == "PixelData":
            data.PixelData = data.PixelData[: draw(st.integers(0, 200))]
        else:
            old = getattr(data, name, None)
            several = isinstance(old, MultiValue)
            setattr(data, name, [draw(values) for _ in old] if several else draw(values))
        stream = io.BytesIO()
        data.save_as(stream, enforce_file_format=True)
    except Exception:  # pydicom writes no such value
        return draw(corrupt(content))
    return stream.getvalue()


@st.composite
def change_json(draw: st.DrawFn, content: bytes) -> bytes:
    """Change a value of a JSON file."""
    return json.dumps(draw(change_value(json.loads(content)))).encode()


@cache
def make_zstd_bomb(*, is_sized: bool) -> bytes:
    """Return a frame of Zstandard with blocks of zeros; it may declare its size."""
    size = b"\xe0" + CHUNK_BOMB_BYTES.to_bytes(8, "little") if is_sized else b"\x00\x58"
    block = ZSTD_BLOCK_BYTES << 3 | 2  # repeats a byte; the lowest bit marks the last block
    blocks = [block] * (CHUNK_BOMB_BYTES // ZSTD_BLOCK_BYTES - 1) + [block | 1]
    return b"\x28\xb5\x2f\xfd" + size + b"".join(b.to_bytes(3, "little") + b"\0" for b in blocks)


@st.composite
def change_zarr(draw: st.DrawFn, content: bytes) -> bytes:
    """Change a value of the metadata, or replace a chunk."""
    if content.startswith(b"{"):
        return draw(change_json(content))
    return make_zstd_bomb(is_sized=draw(st.booleans()))


def draw_volumes(folder: Path, train: tuple[str, ...]) -> st.SearchStrategy[Input]:
    """Return a strategy for commands that read a changed volume of a folder."""
    drawn = [_draw_format(folder / SAMPLES / name) for name in _CHANGES]
    listed = st.one_of(_draw_dataset(folder, train), _draw_dataset(folder, train))
    return st.one_of(*drawn, listed, listed, listed)


_CHANGES: dict[str, Callable[[bytes], st.SearchStrategy[bytes]]] = {
    ".nii": change_nifti,
    "nifti2": change_nifti,
    ".nii.gz": change_gzip,
    ".nrrd": lambda content: change_text_header(content, b"\n\n"),
    ".mha": lambda content: change_text_header(content, b"ElementDataFile = LOCAL\n"),
    ".tif": corrupt,
    ".ome.zarr": change_zarr,
    ".npy": change_numpy,
    "dicom": change_dicom,
}
"""What is changed besides bytes anywhere, by folder of a format's sample."""


@st.composite
def _draw_format(draw: st.DrawFn, folder: Path) -> Input:
    """Change a file of a sample, and predict or evaluate it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw(st.sampled_from(files))
    change: Any = _CHANGES[folder.name]
    if draw(st.integers(0, 2)) == 0:
        change = corrupt
    changed = draw(change(path.read_bytes()))
    where = f"{SAMPLES}/{folder.name}"
    evaluate = (f"predictions={where}", f"references={where}", "output=out/scores", "draw_worst=0")
    predict = ("checkpoint=run.ckpt", f"input={where}", "output=out/x", "device=cpu")
    words = draw(
        st.sampled_from(
            (("predict", *predict, f"memory_gib={PREDICT_GIB}"), ("evaluate", *evaluate))
        )
    )
    name = str(path.relative_to(folder.parents[1]))
    return Input(kind="volume", words=words, files={name: changed})


@st.composite
def _draw_dataset(draw: st.DrawFn, folder: Path, train: tuple[str, ...]) -> Input:
    """Change an image, a label or the listing of a dataset, and check, plan or train with it."""
    names = ("set/imagesTr/case_001.nii.gz", "set/labelsTr/case_002.nii.gz", "set/dataset.json")
    name = draw(st.sampled_from(names))
    change = change_json if name.endswith(".json") else change_gzip
    data = [word for word in train if word.startswith("data")]
    commands = [("check", *data)] * 6 + [train] * 3
    plan = ("plan", *data, "data.cache=conf/cache", "budget_gib=1", "measure_time=false")
    words = draw(st.sampled_from([*commands, plan]))
    return Input(
        kind="volume",
        words=words,
        files={name: draw(change((folder / name).read_bytes()))},
        writes="conf" if words == plan else "out",
    )
