"""Files are the old or the new one, whichever call of the file system fails, and how."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unet3d.atomic_write import create_folder, name_file, write_text
from unet3d.cpp_kernels import find_compiler
from unet3d.errors import RunError

SOURCE = Path(__file__).parents[1] / "scripts" / "robustness" / "fail_calls.c"

CODE = """
import ctypes, errno, json, os, shutil, sys
from pathlib import Path
from unet3d.atomic_write import atomic_write
from unet3d.lit.callbacks.checkpoints import replace_with_copy
from unet3d.run_lock import acquire_lock

def write(folder):
    with atomic_write(folder / "a.txt") as draft:
        draft.write_bytes(b"new")

def copy(folder):
    replace_with_copy(folder / "b.txt", folder / "a.txt")

def lock(folder):
    acquire_lock(folder, print).release()

library, found = ctypes.CDLL(None), []
library.trace_calls(os.open(os.devnull, os.O_WRONLY))
CALLS = ("create", "write", "close", "fsync", "rename", "link", "unlink", "open")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "ESTALE", "EXDEV", "EINVAL")
for action in (write, copy, lock):
    for call in CALLS:
        for error in ERRORS:
            folder = Path(sys.argv[1], f"{action.__name__}-{call}-{error}")
            folder.mkdir()
            (folder / "a.txt").write_bytes(b"old")
            (folder / "b.txt").write_bytes(b"new")
            library.set_fault(call.encode(), f"{folder}/*".encode(), getattr(errno, error), 1, 1)
            reason = None
            try:
                action(folder)
            except OSError as failed:
                reason = [failed.errno, failed.filename]
            library.set_fault(b"", b"", 0, 1, 0)
            files = {f.name: f.read_text() for f in folder.iterdir()}
            found.append([action.__name__, call, error, reason, files])
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux" or not find_compiler(), reason="needs gcc and Linux")
def test_whatever_call_fails_a_file_is_complete_and_no_draft_is_left(tmp_path):
    library = tmp_path / "fail_calls.so"
    compiler = find_compiler()
    command = [compiler, "-shared", "-fPIC", "-w", "-x", "c", SOURCE, "-ldl", "-o", library]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) == 3 * 8 * 9
    raised = 0
    for action, call, error, reason, files in outcomes:
        case = (action, call, error, reason, files)
        content = files.pop("a.txt"), files.pop("b.txt")
        if action == "lock" or reason is not None:
            assert content == ("old", "new"), case
        else:
            assert content == ("new", "new"), case
        if reason is not None:
            raised += 1
            assert reason[0] == getattr(errno, error), case
            assert str(tmp_path) in reason[1], case
        if call != "unlink" and not (action == "lock" and reason is None and call == "open"):
            assert not files, case
    assert raised > 50  # the calls do fail


def test_errors_of_writing_get_the_name_of_their_file(tmp_path):
    path = tmp_path / "a"
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space") as failed, name_file(path):
        full.write_text("a")
    assert failed.value.filename == str(path)


def test_an_error_that_explains_another_keeps_its_message(tmp_path):
    with pytest.raises(RunError, match="explained"), name_file(tmp_path / "a"):
        raise RunError("explained") from OSError(errno.EIO, "Input/output error")


def test_a_folder_gets_the_permissions_of_its_user(tmp_path):
    before = os.umask(0o077)
    try:
        with create_folder(tmp_path / "a"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_text_replaces_a_file_and_is_written_to_a_pipe_or_a_link(tmp_path):
    write_text(tmp_path / "a", "1")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_text(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "2"
    write_text(Path(os.devnull), "3")
    assert Path(os.devnull).is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "link"}


def test_bytes_that_are_not_utf8_are_written_as_escapes(tmp_path):
    write_text(tmp_path / "a", "caf\udce9")
    assert (tmp_path / "a").read_text() == "caf\\udce9"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other rules for names")
@pytest.mark.parametrize(
    "name", [251 * "a" + ".txt", 127 * "é", 250 * "\udcff", 255 * "\udc80", "-a\n=[{"]
)
def test_a_name_of_any_length_and_bytes_can_be_written(tmp_path, name):
    write_text(tmp_path / name, "1")
    with create_folder(tmp_path / name[::-1]) as draft:
        (draft / "a").touch()
    assert {path.name for path in tmp_path.iterdir()} == {name, name[::-1]}
