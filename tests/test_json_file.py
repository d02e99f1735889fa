import json

import pytest

from unet3d.json_file import read_json, read_text


def test_a_link_to_a_device_is_refused_and_a_link_to_a_file_is_read(tmp_path):
    endless, link = tmp_path / "endless.json", tmp_path / "link.json"
    endless.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_json(endless)
    (tmp_path / "own.json").write_text(json.dumps({"a": [1]}))
    link.symlink_to(tmp_path / "own.json")
    assert read_json(link) == {"a": [1]}


def test_what_is_nested_too_deeply_or_too_large_is_a_wrong_value(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="its values are nested too deeply"):
        read_json(file)
    with pytest.raises(ValueError, match="it has more than 99,999 bytes"):
        read_text(file, 99_999)
