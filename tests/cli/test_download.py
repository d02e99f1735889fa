import pytest

from tests.data.helpers.download_server import FILES, TASK, make_archive, md5, serve
from unet3d.cli.main import main


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


def test_a_network_error_keeps_what_was_downloaded(download, tmp_path, capsys, server):
    server.limit = 200_000
    assert download() == 4
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "run the command again to resume from the 0.2 MiB" in error
    part = tmp_path / "my data (1)" / f"{TASK}.tar.part"
    assert part.stat().st_size == 200_000
    assert download(url="http://127.0.0.1:1/gone.tar") == 4
    assert "refused; run the command again to resume from the 0.2 MiB" in capsys.readouterr().err
    server.limit = None
    assert download() == 0
    assert not part.exists()


def test_a_wrong_checksum_is_an_error(download, capsys):
    assert download(md5="0" * 32) == 4
    assert "removed; run the command again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task": None, "url": None},
            "task must be given: task=... (name of the task: Task01_BrainTumour",
        ),
        ({"task": "Task04_Hipocampus", "url": None}, "did you mean Task04_Hippocampus?"),
        ({"md5": None}, "or another one with url= and md5="),
        ({"url": "ftp://x/y.tar"}, "url must begin with http"),
        ({"root": "/proc/x"}, "/proc/x: No such file"),
        ({"tsak": "x"}, "did you mean task?"),
    ],
)
def test_a_usage_error_is_one_line_with_exit_code_2(download, capsys, changes, message):
    assert download(**changes) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
