"""Turn overlapping regions into one label per voxel."""

from collections.abc import Mapping, Sequence

from unet3d.errors import UsageError


def get_region_labels(regions: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the label that a voxel of each region gets: the one that no later region has.

    >>> get_region_labels({"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]})
    [1, 2, 3]
    """
    labels, parts = [], list(regions.values())
    for index, (name, part) in enumerate(regions.items()):
        own = set(part).difference(*parts[index + 1 :])
        if len(own) != 1:
            raise UsageError(
                f"data.regions.{name} must have exactly one label that no later region has (list "
                f"the outermost region first), it has {len(own)}: {sorted(own)}"
            )
        labels += own
    return labels
