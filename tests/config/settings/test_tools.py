from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.tools import parse_check, parse_compare, parse_doctor, parse_download
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


def test_download_takes_a_task_and_where_to_put_it():
    values = {"root": "/data", "url": "https://example.org/x.tar"}
    settings = parse_download(with_values("download", values))
    assert (settings.task, settings.root) == ("Task04_Hippocampus", Path("/data"))
    assert (settings.url, settings.md5) == ("https://example.org/x.tar", None)


def test_compare_takes_folders_that_exist(tmp_path):
    def parse(runs):
        return parse_compare(with_values("compare", {"runs": runs}))

    assert parse([str(tmp_path)]).runs == (tmp_path,)
    with pytest.raises(UsageError, match=r"^name the runs: unet3d compare RUN"):
        parse([])
    with pytest.raises(UsageError, match="none does not exist"):
        parse([str(tmp_path), str(tmp_path / "none")])


def test_doctor_takes_the_keys_of_a_run():
    settings = parse_doctor(with_values("doctor", {"data.batch_size": 7}))
    assert settings.training.data.batch_size == 7
    assert settings.output.format == "table"
