import numpy as np

from unet3d.inference.postprocess import keep_largest_component


def test_only_the_largest_component_of_a_class_is_kept():
    labels = np.zeros((8, 8, 8), np.uint8)
    labels[0, 0, 0] = labels[4:6, 4:6, 4:6] = 2
    labels[7, 7, 7] = labels[0, 7, 0] = 1
    keep_largest_component(labels, [2, 3])
    assert (labels == 2).sum() == 8
    assert labels[0, 0, 0] == 0
    assert (labels == 1).sum() == 2


def test_components_that_touch_at_a_corner_are_one():
    labels = np.zeros((4, 4, 4), np.uint8)
    labels[0, 0, 0] = labels[1, 1, 1] = labels[3, 3, 3] = 1
    keep_largest_component(labels, [1])
    assert labels[0, 0, 0] == labels[1, 1, 1] == 1
    assert labels[3, 3, 3] == 0


def test_other_classes_in_the_box_of_a_class_are_unchanged():
    labels = np.zeros((5, 5, 5), np.uint8)
    labels[0, 0, :2] = labels[4, 4, 4] = 1
    labels[2, 2, 2] = labels[3, 0, 0] = 2
    keep_largest_component(labels, [1])
    assert (labels == 2).sum() == 2
    assert (labels == 1).sum() == 2
