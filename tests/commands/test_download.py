import pytest

from tests.data.helpers.download_server import FILES, TASK, make_archive, md5, serve
from unet3d.__main__ import main


@pytest.fixture
def server():
    with serve(make_archive()) as server:
        yield server


@pytest.fixture
def download(tmp_path, monkeypatch, server):
    """Run `unet3d download` in an empty working folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    usual = {"task": TASK, "url": server.url, "md5": md5(server.content), "root": "my data (1)"}

    def command(**changes):
        words = {**usual, **changes}
        return main(["download", *(f"{k}={v}" for k, v in words.items() if v is not None)])

    return command


def test_a_task_is_downloaded_and_unpacked_once(download, tmp_path, capsys):
    assert download() == 0
    folder = tmp_path / "my data (1)"
    assert [p.name for p in folder.iterdir()] == [TASK]
    assert (folder / TASK / "imagesTr" / "a.nii.gz").read_bytes() == FILES["imagesTr/a.nii.gz"]
    shown = capsys.readouterr()
    assert f"train with data=decathlon data.root=my data (1)/{TASK}" in shown.out
    assert download(url="http://127.0.0.1:1/gone.tar") == 0
    assert "already exists" in capsys.readouterr().out
