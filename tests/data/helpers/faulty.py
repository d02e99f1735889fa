"""Every way in which a case of a Decathlon folder can be at fault."""

import gzip
import os
import shutil

import nibabel
import numpy as np

from tests.data.helpers.folders import AFFINE, SIZE, image, label, save


def header_of(path, **fields):
    """Change fields of a header as it lies on disk, whatever nibabel thinks of them."""
    with gzip.open(path) as file:
        block = bytearray(file.read())
    header = nibabel.Nifti1Header(bytes(block[:348]), check=False)
    for name, value in fields.items():
        header[name] = value
    block[:348] = header.binaryblock
    with gzip.open(path, "wb") as file:
        file.write(block)


def cut(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])


def flipped(path, share):
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 0x10
    path.write_bytes(content)


def without_tail(path):
    path.write_bytes(path.read_bytes()[:-8])


def with_value(path, value, dtype=np.float32):
    array = nibabel.load(path).get_fdata().astype(dtype)
    array[3, 3, 3] = value
    save(path, array, nibabel.load(path).affine)


def turned(affine):
    return affine @ np.diag([-1.0, 1, 1, 1])


def moved(affine, mm):
    return affine + np.array([[0, 0, 0, mm], [0] * 4, [0] * 4, [0] * 4])


def uncompressed_and_cut(path):
    """The file of a case replaced by a plain one that ends early, under the name that is listed."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    nibabel.save(nibabel.load(path), plain)
    cut(plain, 0.5)
    path.unlink()
    listing = path.parents[1] / "dataset.json"
    text = listing.read_text().replace(f"imagesTr/{path.name}", f"imagesTr/{plain.name}")
    listing.write_text(text)


# what is done to (root, image, label) of a case -> what is said of which file
FAULTS = {
    "a missing image": (lambda r, i, t: i.unlink(), "image", "is missing"),
    "a missing label": (lambda r, i, t: t.unlink(), "label", "is missing"),
    "an empty file": (lambda r, i, t: i.write_bytes(b""), "image", "is empty"),
    "no volume": (lambda r, i, t: i.write_bytes(gzip.compress(b"x" * 999)), "image", "not a NIfTI"),
    "no gzip": (lambda r, i, t: i.write_bytes(b"x" * 999), "image", "cannot be read: Not a gzip"),
    "half a file": (lambda r, i, t: cut(i, 0.5), "image", "cannot be decompressed to its end"),
    "half a label": (lambda r, i, t: cut(t, 0.5), "label", "cannot be decompressed to its end"),
    "no checksum": (lambda r, i, t: without_tail(i), "image", "cannot be decompressed to its end"),
    "half a plain file": (
        lambda r, i, t: uncompressed_and_cut(i),
        "plain",
        "ends after 436 of 960 voxels",
    ),
    "a bit flipped": (
        lambda r, i, t: flipped(i, 0.6),
        "image",
        "cannot be (read|decompressed)|goes on",
    ),
    "a wrong checksum": (lambda r, i, t: flipped(i, 0.998), "image", "cannot be read: CRC check"),
    "more than it tells": (
        lambda r, i, t: header_of(i, dim=[3, 12, 10, 7, 1, 1, 1, 1]),
        "image",
        "goes on after the 840 voxels",
    ),
    "sides below 0": (
        lambda r, i, t: header_of(i, dim=[4, 12, 10, 8, -1, 1, 1, 1]),
        "image",
        "header that cannot be: shape",
    ),
    "voxels nowhere": (lambda r, i, t: header_of(i, vox_offset=np.inf), "image", "header that"),
    "a pipe": (lambda r, i, t: (i.unlink(), os.mkfifo(i)), "image", "no file with an end"),
    "a link to itself": (lambda r, i, t: (i.unlink(), i.symlink_to(i)), "image", "symbolic links"),
    "a folder": (lambda r, i, t: (i.unlink(), i.mkdir()), "image", "cannot be read: Is a dir"),
    "NaN": (lambda r, i, t: with_value(i, np.nan), "image", "holds NaN or infinity in 1 of 960"),
    "infinity": (lambda r, i, t: with_value(i, np.inf), "image", "infinity in 1 of 960 voxels"),
    "too large": (lambda r, i, t: with_value(i, 1e300, float), "image", "NaN or infinity"),
    "NaN in a label": (lambda r, i, t: with_value(t, np.nan), "label", "holds NaN"),
    "a class too many": (lambda r, i, t: with_value(t, 3), "label", r"holds 3: .* must be 0\.\.2"),
    "a label below 0": (lambda r, i, t: with_value(t, -2), "label", "holds -2: labels must be"),
    "half a class": (lambda r, i, t: with_value(t, 1.5), "label", "holds 1.5: .* whole numbers"),
    "constant": (lambda r, i, t: save(i, np.full(SIZE, 7.0)), "image", "is 7 everywhere"),
    "another shape": (
        lambda r, i, t: save(t, label(0)[:, :, :6]),
        "label",
        r"shape 12 x 10 x 6, its image 12 x 10 x 8",
    ),
    "another spacing": (
        lambda r, i, t: save(t, label(50), np.diag([1.0, 1, 2.5, 1])),
        "label",
        "spacing 1 x 1 x 2.5 mm, its image 1 x 1 x 2 mm",
    ),
    "another orientation": (
        lambda r, i, t: save(t, label(51), turned(AFFINE)),
        "label",
        "orientation LAS, its image RAS",
    ),
    "another place": (
        lambda r, i, t: save(t, label(52), moved(AFFINE, 3)),
        "label",
        r"up to 3 mm beside its image: affine \[1 0 0 3, .* and \[1 0 0 0,",
    ),
    "4D": (
        lambda r, i, t: save(i, image(70, (*SIZE, 2))),
        "image",
        "shape 12 x 10 x 8 x 2: 2 channels in all, the data set names 1",
    ),
    "a 4D label": (
        lambda r, i, t: save(t, np.stack([label(53)] * 2, -1)),
        "label",
        "one 3D volume",
    ),
    "2D": (lambda r, i, t: save(i, image(71, (12, 10))), "image", "it must be 3D, or 4D"),
    "5D": (lambda r, i, t: save(i, image(72, (4, 4, 4, 1, 2))), "image", "it must be 3D, or 4D"),
    "a slice": (lambda r, i, t: save(i, image(73, (12, 10, 3))), "image", "only 12 x 10 x 3 vox"),
    "colours": (
        lambda r, i, t: save(i, np.zeros(SIZE, [("R", "u1"), ("G", "u1"), ("B", "u1")])),
        "image",
        "not one number each",
    ),
    "no spacing": (
        lambda r, i, t: header_of(i, pixdim=[1, 1, 0, 1, 0, 0, 0, 0]),
        "image",
        "spacing 1 x 0 x 1 mm in its header",
    ),
    "an absurd spacing": (
        lambda r, i, t: header_of(i, pixdim=[1, 1, 1, 9e9, 0, 0, 0, 0]),
        "image",
        "spacing 1 x 1 x 9e",
    ),
    "a singular affine": (
        lambda r, i, t: header_of(i, srow_z=[0, 1, 0, 0]),
        "image",
        r"affine \[1 0 0 0, 0 1 0 0, 0 1 0 0\], which is no grid in space",
    ),
    "NaN in the affine": (
        lambda r, i, t: header_of(i, srow_x=[np.nan] * 4),
        "image",
        "no grid in space",
    ),
    "an unknown type": (lambda r, i, t: header_of(i, datatype=999), "image", "header that cannot"),
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


def spoil(root, case, fault):
    """Do a fault to a case; return what must be said of it."""
    change, kind, said = FAULTS[fault]
    files = [root / folder / f"{case}.nii.gz" for folder in ("imagesTr", "labelsTr")]
    change(root, *files)
    file = {"image": files[0], "label": files[1], "plain": files[0].with_suffix("")}[kind]
    return case, file, said
