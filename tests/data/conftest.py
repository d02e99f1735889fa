"""Fixtures for the tests of unet3d.data."""

import numpy as np
import pytest

from unet3d.data.case import Case
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.data.preprocessing.statistics import Statistics


@pytest.fixture
def voxels():
    return np.random.default_rng(0).integers(0, 999, (10, 9, 7)).astype(np.int16)


@pytest.fixture
def volumes(tmp_path):
    """Three cached volumes of different sizes with two foreground classes each."""
    volumes, rng = [], np.random.default_rng(0)
    for n, size in enumerate([(12, 11, 10), (9, 9, 9), (16, 8, 12)]):
        folder = tmp_path / str(n)
        folder.mkdir()
        arrays = {
            "image": rng.normal(size=(2, *size)).astype(np.float32),
            "label": rng.integers(0, 3, size, np.uint8),
            "foreground_points": np.array([[1, 3, 3, 3], [2, 5, 5, 5]], np.int32),
        }
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        case = Case(name=f"case{n}", images=(folder / "image",), label=folder / "label")
        statistics = Statistics(spacing_mm=(1, 1, 1), extent_mm=(9, 9, 9), percentiles=())
        volumes.append(CachedVolume(case, folder, size, frozenset({1, 2}), statistics))
    return volumes
