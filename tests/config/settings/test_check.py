from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.check import parse_check
from unet3d.errors import UsageError


def test_check_reads_every_voxel_with_one_worker_per_core():
    settings = parse_check(with_values("check", {}))
    assert settings.read_voxels
    assert settings.workers is None
    assert settings.data.root == Path("data/synthetic")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("read_voxels", "some", "read_voxels must be true or false, got 'some'"),
        ("workers", 0, "workers must be an int >= 1, got 0"),
        ("format", "png", "format must be one of table, json, got 'png'"),
        ("data.batch_size", 0, "data.batch_size must be an int >= 1, got 0"),
    ],
)
def test_a_wrong_value_of_check_is_refused(key, value, expected):
    with pytest.raises(UsageError) as caught:
        parse_check(with_values("check", {key: value}))
    assert str(caught.value) == expected
