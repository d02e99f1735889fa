import pytest

from tests.data.helpers.download_server import FILES, TASK, make_archive, md5, serve
from unet3d.__main__ import main
from unet3d.data.layouts.download import download, extract
from unet3d.errors import RunError, UsageError


@pytest.fixture
def server():
    with serve(make_archive()) as server:
        yield server


def fetch(server, part, progress=lambda *_: None):
    download(server.url, md5(server.content), part, progress)
    return part.read_bytes()


def test_an_interrupted_download_resumes(server, tmp_path):
    part, server.limit, calls = tmp_path / "new" / "a.part", 100_000, []
    with pytest.raises(RunError, match=r"after 100,000 of .*resume from .*a\.part"):
        fetch(server, part)
    assert part.stat().st_size == 100_000
    server.limit = None
    assert fetch(server, part, lambda *done: calls.append(done)) == server.content
    assert calls[-1] == (len(server.content),) * 2
    assert fetch(server, part) == server.content  # which is complete already
    assert server.requests == [None, "bytes=100000-", f"bytes={len(server.content)}-"]


def test_a_wrong_checksum_removes_the_download(server, tmp_path):
    part = tmp_path / "a.part"
    part.write_bytes(b"x" * 10_000_000)
    with pytest.raises(RunError, match=r"has MD5 .*, expected .*: removed; run the command again"):
        fetch(server, part)
    assert not part.exists()


def test_a_missing_file_or_server_is_an_error(server, tmp_path):
    part = tmp_path / "a.part"
    with pytest.raises(RunError, match="answers 404 Not Found"):
        download(server.url + "x", "", part, lambda *_: None)
    with pytest.raises(RunError, match=r"cannot be downloaded: .*refused"):
        download("http://127.0.0.1:1/a.tar", "", part, lambda *_: None)
    with pytest.raises(UsageError, match="must begin with http"):
        download("file:///etc/passwd", "", part, lambda *_: None)


def extract_archive(tmp_path, content):
    part = tmp_path / "a.part"
    part.write_bytes(content)
    extract(part, tmp_path / TASK, lambda *_: None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (make_archive({"readme": b""}), f"does not contain {TASK}/dataset.json"),
        (make_archive()[:250_000], "cannot be extracted: unexpected end of data"),
    ],
)
def test_an_incomplete_archive_leaves_nothing(tmp_path, content, message):
    (tmp_path / "data").mkdir()
    with pytest.raises(RunError, match=message):
        extract_archive(tmp_path / "data", content)
    assert [p.name for p in tmp_path.rglob("*")] == ["data", "a.part"]


def test_a_task_is_downloaded_and_unpacked_once(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["download", f"task={TASK}", f"md5={md5(server.content)}", "root=my data (1)"]
    assert main([*words, f"url={server.url}"]) == 0
    folder = tmp_path / "my data (1)"
    assert [p.name for p in folder.iterdir()] == [TASK]
    assert (folder / TASK / "imagesTr" / "a.nii.gz").read_bytes() == FILES["imagesTr/a.nii.gz"]
    shown = capsys.readouterr()
    assert f"train with data=decathlon data.root=my data (1)/{TASK}" in shown.out
    assert main([*words, "url=http://127.0.0.1:1/gone.tar"]) == 0
    assert "already exists" in capsys.readouterr().out
