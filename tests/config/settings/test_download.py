from pathlib import Path

from tests.config.helpers.configs import with_values
from unet3d.config.settings.download import parse_download


def test_download_takes_a_task_and_where_to_put_it():
    values = {"root": "/data", "url": "https://example.org/x.tar"}
    settings = parse_download(with_values("download", values))
    assert (settings.task, settings.root) == ("Task04_Hippocampus", Path("/data"))
    assert (settings.url, settings.md5) == ("https://example.org/x.tar", None)
