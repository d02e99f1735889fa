"""Turn overlapping regions into one label per voxel."""

from collections.abc import Mapping, Sequence

from unet3d.errors import UsageError


def get_region_labels(
    regions: Mapping[str, Sequence[int]], labels: Sequence[int] | None = None
) -> list[int]:
    """Return the label that a voxel of each region gets: the one that no later region has.

    `labels` names them instead, one per region.

    >>> get_region_labels({"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]})
    [1, 2, 3]
    """
    if labels is not None:
        named = zip(regions.items(), labels, strict=False)
        wrong = [f"{label} for {name}" for (name, part), label in named if label not in part]
        if len(labels) != len(regions):
            wrong = [f"{len(labels)} labels for {len(regions)} regions"]
        if wrong:
            raise UsageError(
                "data.region_labels must name a label of each region, in their order, got "
                f"{wrong[0]}"
            )
        return list(labels)
    derived: list[int] = []
    parts = list(regions.values())
    for index, (name, part) in enumerate(regions.items()):
        own = set(part).difference(*parts[index + 1 :])
        if len(own) != 1:
            raise UsageError(
                f"data.regions.{name} must have exactly one label that no later region has (list "
                f"the outermost region first) unless data.region_labels is set, it has {len(own)}: "
                f"{sorted(own)}"
            )
        derived += own
    return derived
