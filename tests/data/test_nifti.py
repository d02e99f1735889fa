import nibabel
import numpy as np

from unet3d.data.nifti import read


def test_integers_stay_integers_unless_the_header_scales_them(tmp_path):
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(voxels, np.eye(4))
    nibabel.save(image, tmp_path / "plain.nii")
    image.header.set_slope_inter(0.5, -3)
    nibabel.save(image, tmp_path / "scaled.nii.gz")
    plain, scaled = (read(tmp_path / name)[0] for name in ("plain.nii", "scaled.nii.gz"))
    assert plain.dtype == np.int16
    np.testing.assert_array_equal(plain[0], voxels)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled[0], voxels * 0.5 - 3)
