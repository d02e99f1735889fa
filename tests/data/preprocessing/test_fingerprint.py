import numpy as np
import pytest

from tests.data.helpers.cases import noise, preprocess, write_case, zero_padded_noise
from unet3d.data.preprocessing.fingerprint import (
    compute_foreground_intensities,
    compute_median_spacing,
    fingerprint_dataset,
)


@pytest.mark.parametrize("ignored", [9, -1])
def test_ct_is_clipped_and_scaled_by_the_foreground_of_the_dataset(tmp_path, ignored):
    image = noise(8, 8, 8)
    label = np.zeros((8, 8, 8), np.int16)
    label[2:6], label[6:] = 1, ignored
    case = write_case(tmp_path, image, label)
    fingerprints = fingerprint_dataset([case], "RAS", tmp_path / "cache", ignored=[ignored])
    intensities = compute_foreground_intensities(fingerprints)
    foreground = image[label == 1]
    mean, std = foreground.mean(), foreground.std()
    low, high = np.percentile(foreground, (0.5, 99.5))
    np.testing.assert_allclose(intensities, [(mean, std, low, high)], rtol=1e-5)
    settings = {"normalize": ("ct",), "intensities": intensities, "ignore_labels": (ignored,)}
    volume = preprocess(case, tmp_path, **settings)
    expected = (np.clip(image, low, high) - mean) / std
    np.testing.assert_allclose(volume.image[0], expected, atol=1e-4)


def test_a_fingerprint_has_sizes_spacings_and_classes_and_is_cached(tmp_path):
    label = np.zeros((12, 12, 12), np.uint8)
    label[3, 4, 5] = label[5, 6, 9] = 1
    case = write_case(tmp_path, zero_padded_noise(), label, affine=np.diag([2.0, 1, 1, 1]))
    fingerprint = fingerprint_dataset([case], "RAS", tmp_path / "cache")[0]
    assert (fingerprint.shape, fingerprint.spacing_mm) == ((6, 6, 8), (2.0, 1.0, 1.0))
    assert fingerprint.voxels == {0: 286, 1: 2}
    assert fingerprint.centers == {1: (2.0, 2.0, 3.0)}
    assert fingerprint.crop_fraction == pytest.approx(288 / 1728)
    assert compute_median_spacing([case], "SRA") == (1.0, 2.0, 1.0)
    (file,) = (tmp_path / "cache").rglob("values.json")
    written = file.stat().st_mtime_ns
    fingerprint_dataset([case], "RAS", tmp_path / "cache")
    assert file.stat().st_mtime_ns == written
