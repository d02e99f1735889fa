import tarfile

import pytest

from tests.data.helpers.archive import FILES, TASK, archive, md5, serving
from unet3d.data.layouts.download import download, extract, task_urls
from unet3d.errors import RunError, UsageError


@pytest.fixture
def server():
    with serving(archive()) as server:
        yield server


def fetched(server, part, told=None):
    def progress(*done):
        if told is not None:
            told.append(done)

    download(server.url, md5(server.content), part, progress)
    return part.read_bytes()


def test_the_ten_tasks_have_addresses_and_checksums():
    known = task_urls()
    assert len(known) == 10
    url, checksum = known["Task04_Hippocampus"]
    assert url.endswith("/Task04_Hippocampus.tar")
    assert len(checksum) == 32


def test_a_file_is_fetched_and_progress_told_to_the_end(server, tmp_path):
    told = []
    assert fetched(server, tmp_path / "new" / "a.part", told) == server.content
    assert told[-1] == (len(server.content),) * 2


def test_a_fetch_that_was_cut_off_goes_on_where_it_was(server, tmp_path):
    part, server.limit = tmp_path / "a.part", 100_000
    with pytest.raises(
        RunError, match=r"ended after 100,000 of .* from the 0\.1 MiB that are in .*a\.part"
    ):
        fetched(server, part)
    assert part.stat().st_size == 100_000
    server.limit = None
    assert fetched(server, part) == server.content
    assert server.asked == [None, "bytes=100000-"]


def test_a_server_without_ranges_sends_all_of_it_again(server, tmp_path):
    part, server.ranges = tmp_path / "a.part", False
    part.write_bytes(server.content[:1000])
    assert fetched(server, part) == server.content


def test_what_is_whole_already_is_not_fetched_again(server, tmp_path):
    part = tmp_path / "a.part"
    part.write_bytes(server.content)
    assert fetched(server, part) == server.content


@pytest.mark.parametrize("there", [b"", b"x" * 1000, b"x" * 10_000_000])
def test_a_wrong_checksum_removes_what_was_fetched(server, tmp_path, there):
    part = tmp_path / "a.part"
    part.write_bytes(there)
    checksum = md5(b"another file") if not there else md5(server.content)
    with pytest.raises(RunError, match=r"has MD5 .*, expected .*: removed"):
        download(server.url, checksum, part, lambda *_: None)
    assert not part.exists()
    assert fetched(server, part) == server.content


def test_a_server_that_has_not_the_file_or_is_not_there_is_a_fault(server, tmp_path):
    part = tmp_path / "a.part"
    with pytest.raises(RunError, match="answers 404 Not Found"):
        download(server.url + "x", "", part, lambda *_: None)
    with pytest.raises(RunError, match=r"cannot be fetched: .*refused"):
        download("http://127.0.0.1:1/a.tar", "", part, lambda *_: None)
    with pytest.raises(UsageError, match="must begin with http"):
        download("file:///etc/passwd", "", part, lambda *_: None)


def test_a_full_disk_is_told_in_a_line(server, tmp_path):
    part = tmp_path / "a.part"
    part.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"no space left on the disk \(\d+ MiB are free\)"):
        fetched(server, part)


def unpacked(tmp_path, content):
    part = tmp_path / "a.part"
    part.write_bytes(content)
    extract(part, tmp_path / TASK, lambda *_: None)


def test_an_archive_is_unpacked_whole(tmp_path):
    unpacked(tmp_path, archive({**FILES, "imagesTr/._a.nii.gz": b"macOS"}))
    there = {p: p.read_bytes() for p in (tmp_path / TASK).rglob("*") if p.is_file()}
    assert there == {tmp_path / TASK / name: content for name, content in FILES.items()}
    assert {p.name for p in tmp_path.iterdir()} == {TASK, "a.part"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive(**{"../evil": tarfile.REGTYPE}), "wants to write outside of its folder: ../evil"),
        (archive(**{f"{TASK}/../../evil": tarfile.REGTYPE}), "outside"),
        (archive(**{"/tmp/unet3d-evil": tarfile.REGTYPE}), "outside"),
        (archive(**{f"{TASK}/link": tarfile.SYMTYPE}), "link, which is no plain file"),
        (archive(**{f"{TASK}/link": tarfile.LNKTYPE}), "link, which is no plain file"),
        (archive(**{f"{TASK}/pipe": tarfile.FIFOTYPE}), "pipe, which is no plain file"),
        (archive({"readme": b""}), f"holds no {TASK}/dataset.json"),
        (archive()[:250_000], "cannot be unpacked: unexpected end of data"),
        (b"no archive", "cannot be unpacked"),
    ],
)
def test_an_archive_that_is_not_whole_or_not_safe_leaves_nothing(tmp_path, content, said):
    (tmp_path / "data").mkdir()
    with pytest.raises(RunError, match=said):
        unpacked(tmp_path / "data", content)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["a.part"]
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.part"]


def test_a_draft_of_a_killed_process_is_not_kept(tmp_path):
    (tmp_path / f".{TASK}.draft" / TASK).mkdir(parents=True)
    (tmp_path / f".{TASK}.draft" / TASK / "old").write_text("x")
    unpacked(tmp_path, archive())
    assert not (tmp_path / TASK / "old").exists()
