"""Faults that datasets have, to plant in a case of a Decathlon folder."""

import gzip
import shutil

import nibabel
import numpy as np

from tests.data.helpers.datasets import AFFINE, SIZE, make_image, make_label, save_volume


def set_header_fields(path, **fields):
    """Overwrite header fields on disk without nibabel's checks."""
    with gzip.open(path) as file:
        block = bytearray(file.read())
    header = nibabel.Nifti1Header(bytes(block[:348]), check=False)
    for name, value in fields.items():
        header[name] = value
    block[:348] = header.binaryblock
    with gzip.open(path, "wb") as file:
        file.write(block)


def truncate(path, fraction):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])


def flip_bit(path, position):
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 0x10
    path.write_bytes(content)


def set_value(path, value, dtype=np.float32):
    array = nibabel.load(path).get_fdata().astype(dtype)
    array[3, 3, 3] = value
    save_volume(path, array, nibabel.load(path).affine)


def shift_affine(affine, mm):
    return affine + np.array([[0, 0, 0, mm], [0] * 4, [0] * 4, [0] * 4])


def replace_by_truncated_plain_file(path):
    """Replace a case's file by an uncompressed one that ends early, and list that."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    nibabel.save(nibabel.load(path), plain)
    truncate(plain, 0.5)
    path.unlink()
    listing = path.parents[1] / "dataset.json"
    text = listing.read_text().replace(f"imagesTr/{path.name}", f"imagesTr/{plain.name}")
    listing.write_text(text)


# name: (change of (root, image, label), file that is reported, pattern of the problem)
CORRUPTIONS = {
    "not a volume": (
        lambda r, i, t: i.write_bytes(gzip.compress(b"x" * 999)),
        "image",
        "not a NIfTI",
    ),
    "not gzip": (lambda r, i, t: i.write_bytes(b"x" * 999), "image", "cannot be read: Not a gzip"),
    "a truncated file": (
        lambda r, i, t: truncate(i, 0.5),
        "image",
        "cannot be decoded: Compressed file ended",
    ),
    "a truncated plain file": (
        lambda r, i, t: replace_by_truncated_plain_file(i),
        "plain",
        "ends after 436 of 960 voxels",
    ),
    "a flipped bit": (
        lambda r, i, t: flip_bit(i, 0.6),
        "image",
        "cannot be (read|decoded)|contains data beyond",
    ),
    "a wrong checksum": (
        lambda r, i, t: flip_bit(i, 0.998),
        "image",
        "cannot be read: CRC check",
    ),
    "more voxels than declared": (
        lambda r, i, t: set_header_fields(i, dim=[3, 12, 10, 7, 1, 1, 1, 1]),
        "image",
        "contains data beyond the 840 voxels",
    ),
    "NaN": (lambda r, i, t: set_value(i, np.nan), "image", "holds NaN or infinity in 1 of 960"),
    "NaN in a label": (lambda r, i, t: set_value(t, np.nan), "label", "holds NaN"),
    "an unknown class": (lambda r, i, t: set_value(t, 3), "label", r"holds 3: .* must be 0\.\.2"),
    "a negative label": (lambda r, i, t: set_value(t, -2), "label", "holds -2: labels must be"),
    "a constant image": (
        lambda r, i, t: save_volume(i, np.full(SIZE, 7.0)),
        "image",
        "^is 7 everywhere",
    ),
    "another shape": (
        lambda r, i, t: save_volume(t, make_label(0)[:, :, :6]),
        "label",
        r"shape 12 x 10 x 6, but its image 12 x 10 x 8",
    ),
    "another position": (
        lambda r, i, t: save_volume(t, make_label(52), shift_affine(AFFINE, 3)),
        "label",
        r"is offset by up to 3 mm from its image: affine \[1 0 0 3, .* and \[1 0 0 0,",
    ),
    "a 4D label": (
        lambda r, i, t: save_volume(t, np.stack([make_label(53)] * 2, -1)),
        "label",
        "one 3D volume",
    ),
    "2D": (
        lambda r, i, t: save_volume(i, make_image(71, (12, 10))),
        "image",
        "it must be 3D, or 4D",
    ),
    "a slice": (
        lambda r, i, t: save_volume(i, make_image(73, (12, 10, 3))),
        "image",
        "only 12 x 10 x 3 vox",
    ),
    "RGB voxels": (
        lambda r, i, t: save_volume(i, np.zeros(SIZE, [("R", "u1"), ("G", "u1"), ("B", "u1")])),
        "image",
        "not one real number each",
    ),
    "a spacing of 0": (
        lambda r, i, t: set_header_fields(i, pixdim=[1, 1, 0, 1, 0, 0, 0, 0]),
        "image",
        "spacing 1 x 0 x 1 mm in its header",
    ),
    "an absurd spacing": (
        lambda r, i, t: set_header_fields(i, pixdim=[1, 1, 1, 9e9, 0, 0, 0, 0]),
        "image",
        "spacing 1 x 1 x 9e",
    ),
    "a singular affine": (
        lambda r, i, t: set_header_fields(i, srow_z=[0, 1, 0, 0]),
        "image",
        r"invalid affine \[1 0 0 0, 0 1 0 0, 0 1 0 0\]",
    ),
    "the same image": (
        lambda r, i, t: shutil.copy(r / "imagesTr" / "case_00.nii.gz", i),
        "image",
        "same voxels as case_00.nii.gz of case_00",
    ),
    "the same label": (
        lambda r, i, t: shutil.copy(r / "labelsTr" / "case_00.nii.gz", t),
        "label",
        "same voxels as case_00.nii.gz of case_00",
    ),
}


def corrupt(root, case, corruption):
    """Break a case; return (case, file, pattern of the problem) to expect."""
    change, kind, pattern = CORRUPTIONS[corruption]
    files = [root / folder / f"{case}.nii.gz" for folder in ("imagesTr", "labelsTr")]
    change(root, *files)
    file = {"image": files[0], "label": files[1], "plain": files[0].with_suffix("")}[kind]
    return case, file, pattern
