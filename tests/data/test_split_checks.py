import numpy as np

from tests.data.helpers.cases import noise, write_case
from unet3d.data.preprocessing.cache import preprocess_all
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.split_checks import find_rare_classes


def test_classes_with_a_handful_of_voxels_in_all_validation_cases_are_named(tmp_path):
    cases = []
    for n in range(2):
        label = np.zeros((8, 8, 8), np.uint8)
        label[0], label[2, 0, :4], label[4, 0, :5] = 1, 2, 3
        cases.append(write_case(tmp_path, noise(8, 8, 8), label, name=f"case{n}"))
    volumes = preprocess_all(cases, Preprocessing(num_classes=5, crop="none"), tmp_path / "cache")
    classes = {"organ": [1], "few": [2], "ten": [3], "union": [1, 2], "absent": [4]}
    [absent, few] = find_rare_classes(classes, volumes, volumes)
    assert absent.startswith("no case has absent, so it cannot be learned")
    assert few.startswith("under 10 validation voxels are few, so its Dice, which helps to choose")
