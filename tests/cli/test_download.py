import pytest

from tests.data.helpers.archive import FILES, TASK, archive, md5, serving
from unet3d.cli.main import main


@pytest.fixture
def server():
    with serving(archive()) as server:
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


def test_a_task_is_fetched_unpacked_and_left_alone_afterwards(download, tmp_path, capsys):
    assert download() == 0
    folder = tmp_path / "my data (1)"
    assert [p.name for p in folder.iterdir()] == [TASK]
    assert (folder / TASK / "imagesTr" / "a.nii.gz").read_bytes() == FILES["imagesTr/a.nii.gz"]
    shown = capsys.readouterr()
    assert f"train with data=decathlon data.root=my data (1)/{TASK}" in shown.out
    assert "bytes fetched" in shown.err
    assert download(url="http://127.0.0.1:1/gone.tar") == 0
    assert "is there already" in capsys.readouterr().out


def test_no_network_is_a_fault_that_keeps_what_was_fetched(download, tmp_path, capsys, server):
    server.limit = 200_000
    assert download() == 4
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the same command goes on from the 0.2 MiB" in error
    part = tmp_path / "my data (1)" / f"{TASK}.tar.part"
    assert part.stat().st_size == 200_000
    assert download(url="http://127.0.0.1:1/gone.tar") == 4
    assert "refused; the same command goes on from the 0.2 MiB" in capsys.readouterr().err
    server.limit = None
    assert download() == 0
    assert not part.exists()


def test_a_wrong_checksum_is_a_fault(download, capsys):
    assert download(md5="0" * 32) == 4
    assert "removed, the next try begins anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"task": None, "url": None},
            "task must be given: task=... (name of the task: Task01_BrainTumour",
        ),
        ({"task": "Task04_Hipocampus", "url": None}, "did you mean Task04_Hippocampus?"),
        ({"md5": None}, "another with url= and md5="),
        ({"task": "../x"}, "task must be the name of a folder"),
        ({"url": "ftp://x/y.tar"}, "url must begin with http"),
        ({"root": "/proc/x"}, "/proc/x: No such file"),
        ({"tsak": "x"}, "did you mean task?"),
    ],
)
def test_misuse_is_answered_in_a_line_with_2(download, capsys, changes, said):
    assert download(**changes) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
