"""A file that is cut off or overwritten is read, or refused in one line that names it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.helpers.formats import (
    write_itk,
    write_nifti,
    write_numpy,
    write_series,
    write_tiff,
    write_zarr,
)
from unet3d.data.formats.volumes import list_files, read_volume
from unet3d.errors import UsageError

WRITERS = {
    "a.nii.gz": write_nifti,
    "a.nii": write_nifti,
    "a.nrrd": write_itk,
    "a.mha": write_itk,
    "a.tif": write_tiff,
    "a.zarr": write_zarr,
    "a.npy": write_numpy,
    "a": write_series,
}
TRUSTING = ("a.nrrd", "a.mha")
"""Read by SimpleITK, which trusts what a header says: these are only cut off."""

fraction = st.floats(0, 1)


@pytest.mark.filterwarnings("ignore")  # of the libraries, about what they find
@pytest.mark.parametrize("name", WRITERS)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(part=fraction, start=fraction, end=fraction, noise=st.binary(max_size=64))
def test_a_changed_file_is_read_or_refused_in_one_line(tmp_path, name, part, start, end, noise):
    voxels = np.random.default_rng(0).integers(0, 99, (6, 5, 4)).astype(np.uint16)
    file = tmp_path / name
    if not file.exists():
        WRITERS[name](file, voxels, np.diag([0.5, 0.5, 2.0, 1.0]))
    files = list_files(file)
    changed: Path = files[int(part * (len(files) - 1))]
    original = changed.read_bytes()
    at = int(start * len(original))
    body = original if name in TRUSTING else original[:at] + noise + original[at + len(noise) :]
    changed.write_bytes(body[: int(end * len(body))] if len(noise) % 2 else body)
    message = f"{file}: read"
    try:
        read_volume(file)
    except UsageError as error:
        message = str(error)
    finally:
        changed.write_bytes(original)
    assert message.startswith(str(file))
    assert "\n" not in message
