import numpy as np
import pytest

from unet3d.data.preprocessing.fingerprint import CaseFingerprint
from unet3d.planning.dataset_summary import (
    compute_volume_fractions,
    summarize_dataset,
)

CLASSES = ("background", "a", "b")


def make_fingerprint(voxels):
    return CaseFingerprint(
        voxels=voxels,
        centers={},
        shape=(10, 10, 8),
        crop_fraction=1.0,
        spacing_mm=(1.0, 1.0, 2.0),
        intensities=np.arange(50.0)[None],
        background=(0.0,),
    )


@pytest.fixture
def fingerprints():
    """Two cases of 800 voxels, of which only the first has class b; class a differs in size."""
    return [make_fingerprint({0: 680, 1: 80, 2: 40}), make_fingerprint({0: 640, 1: 160})]


def test_a_case_without_voxels_has_class_volumes_of_0():
    assert not compute_volume_fractions([make_fingerprint({})], CLASSES).any()


def test_a_summary_counts_the_cases_of_each_class(fingerprints):
    assert summarize_dataset(fingerprints, CLASSES, "DHW").splitlines() == [
        "2 cases, sizes 10 x 10 x 8 voxels (D x H x W)",
        "spacings 1 x 1 x 2 mm",
        "a: in 2 cases, 15% of the voxels",
        "b: in 1 case, 2.5% of the voxels",
    ]
