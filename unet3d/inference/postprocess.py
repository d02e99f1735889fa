"""Keep only the largest connected component of a class that occurs once per patient."""

from collections.abc import Sequence

import numpy as np

BYTES_PER_VOXEL = 8
"""Most bytes per voxel that `keep_largest_component` needs."""


def keep_largest_component(labels: np.ndarray, classes: Sequence[int]) -> dict[int, float]:
    """Turn all but the largest component of each class into background, in place.

    Return the share of its voxels that each class has lost, if any.
    """
    from scipy.ndimage import find_objects, label

    boxes, removed = find_objects(labels), {}
    for index in classes:
        box = boxes[index - 1] if index <= len(boxes) else None
        if box is None:  # the class is absent
            continue
        part = labels[box]
        mask = part == index
        components, count = label(mask, np.ones((3, 3, 3)))  # faces, edges and corners connect
        if count > 1:
            sizes = np.zeros(count + 1, np.int64)
            for plane in components:  # all at once, bincount would copy them to 64 bits
                sizes += np.bincount(plane.ravel(), minlength=count + 1)
            mask &= components != 1 + np.argmax(sizes[1:])
            part[mask] = 0
            removed[index] = 1 - float(sizes[1:].max() / sizes[1:].sum())
    return removed
