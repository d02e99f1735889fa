import numpy as np

from unet3d.data.preprocessing.fingerprint import CaseFingerprint
from unet3d.planning.experiment import summarize_dataset


def test_voxels_of_micrometers_are_not_rounded_to_nothing():
    case = CaseFingerprint(
        shape=(8, 8, 4),
        crop_fraction=1.0,
        spacing_mm=(0.0003, 0.0003, 0.001),
        voxels={0: 200, 1: 56},
        centers={1: (4.0, 4.0, 2.0)},
        intensities=np.zeros((1, 1)),
        background=(0.0,),
    )
    assert "spacings 0.0003 x 0.0003 x 0.001 mm" in summarize_dataset([case], ["a", "b"], "RAS")
