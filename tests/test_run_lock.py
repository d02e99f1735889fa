"""A folder has one writer: locks of processes here, elsewhere, gone, and racing."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from unet3d import run_lock
from unet3d.errors import UsageError
from unet3d.run_lock import NAME, RunLock, acquire_lock, list_holders, make_record


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.02)


def write_lock(folder, **changes):
    """Write the lock of this process, changed to that of another."""
    record = json.dumps(json.loads(make_record()) | changes).encode()
    (folder / NAME).write_bytes(record)
    return RunLock(folder, record)


def acquire(folder):
    return acquire_lock(folder, lambda line: None)


def test_a_lock_names_its_process_and_is_removed(tmp_path):
    lock = acquire(tmp_path)
    with pytest.raises(UsageError, match=rf"in use by process {os.getpid()} on .*, since 20"):
        acquire(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    acquire(tmp_path).release()


def make_folder(path):
    path.mkdir()


def make_link(path):
    path.symlink_to("nowhere")


def make_pipe(path):
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_folder, make_link, make_pipe])
def test_what_is_no_file_is_not_taken_for_a_lock(tmp_path, make):
    lock = acquire(tmp_path)
    lock.path.unlink()
    make(lock.path)
    with pytest.raises(UsageError, match=r"run\.lock is not a regular file, where a run has its"):
        acquire(tmp_path)
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_the_text_of_a_lock_cannot_command_a_terminal(tmp_path):
    write_lock(tmp_path, host="a\x1b[2Jb", started="\x1b[1m")
    with pytest.raises(UsageError, match=r"on a\\x1b\[2Jb, since \\x1b\[1m"):
        acquire(tmp_path)
    lines = []
    write_lock(tmp_path, host="a\x1b[2Jb", boot="other")
    acquire_lock(tmp_path, lines.append)
    assert "on a\\x1b[2Jb: waiting" in lines[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_a_process_may_have_a_name_of_any_bytes(tmp_path):
    program = tmp_path / os.fsdecode(b"\xff)")
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "99"]) as process:
        while Path(f"/proc/{process.pid}/comm").read_bytes() != b"\xff)\n":
            time.sleep(0.01)
        try:
            assert run_lock.read_process(process.pid)[0] in ("R", "S")
        finally:
            process.kill()


def test_a_draft_that_could_not_be_removed_is_removed_with_the_lock(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", Mock(side_effect=PermissionError))
        lock = acquire(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_removes_what_one_that_is_gone_has_left(tmp_path):
    gone = write_lock(tmp_path, process_start="1", pid=2**22 + 1).record
    ours = make_record()
    for path in (run_lock.get_draft, run_lock.get_successor):
        for record in (gone, ours):
            path(tmp_path / NAME, record).write_bytes(record)
    (tmp_path / NAME).unlink()
    acquire(tmp_path).release()
    left = {path.read_bytes() for path in tmp_path.iterdir()}
    assert left == {ours}  # of a process that runs


def test_a_killed_process_leaves_a_lock_that_is_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 99)
    code = (
        "import sys, time; from pathlib import Path; from unet3d.run_lock import acquire_lock;"
        "acquire_lock(Path(sys.argv[1]), print); print('held', flush=True); time.sleep(99)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"process {process.pid} "):
            acquire(tmp_path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds nothing
        acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"process_start": "1"},  # another process had this id before
        {"pid": 2**22 + 1},
    ],
)
def test_the_id_of_a_process_alone_does_not_hold_a_lock(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 99)
    write_lock(tmp_path, **changes)
    acquire(tmp_path).release()


@pytest.mark.parametrize("elsewhere", [{"boot": "other"}, {"pid_namespace": "pid:[1]"}])
def test_a_process_elsewhere_holds_its_lock_as_long_as_its_heart_beats(tmp_path, elsewhere):
    """The clocks of the hosts do not matter: this heartbeat is of the year 2001."""
    lock = write_lock(tmp_path, pid=1, host="node7", **elsewhere)
    beats = iter(range(10**9, 2 * 10**9))
    ended = threading.Event()

    def beat():
        while not ended.wait(0.02):
            os.utime(lock.path, (0, next(beats)))

    thread = threading.Thread(target=beat)
    os.utime(lock.path, (0, time.time() + 10**6))
    thread.start()
    try:
        with pytest.raises(UsageError, match="in use by process 1 on node7"):
            acquire(tmp_path)
    finally:
        ended.set()
        thread.join()
    os.utime(lock.path)
    lines = []
    start = time.monotonic()
    taken = acquire_lock(tmp_path, lines.append)
    assert time.monotonic() - start > 0.4
    assert "waiting up to 1 s for a sign of life" in lines[0]
    assert not lock.is_held()
    taken.release()
    assert list(tmp_path.iterdir()) == []


def test_after_an_old_heartbeat_of_another_host_two_beats_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 60)
    lock = write_lock(tmp_path, boot="other")
    os.utime(lock.path, (0, time.time() - 61))
    start = time.monotonic()
    acquire(tmp_path).release()
    assert time.monotonic() - start < 5


def test_a_clock_that_jumps_does_not_end_a_lock_whose_heart_beats(tmp_path):
    lock = write_lock(tmp_path, boot="other")
    os.utime(lock.path, (1, 1))  # the last beat was decades ago
    beat = threading.Timer(0.05, os.utime, [lock.path])
    beat.start()
    with pytest.raises(UsageError, match="in use"):
        acquire(tmp_path)
    beat.join()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[1]", b'{"pid": "x"}'])
def test_a_lock_that_cannot_be_read_is_taken_over_when_nobody_renews_it(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("kind", ["none", "gone", "taken over by one that is gone"])
def test_one_of_many_gets_a_lock(tmp_path, monkeypatch, has_links, kind):
    if not has_links:

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(os, "link", refuse)
    for n in range(10):
        folder = tmp_path / str(n)
        folder.mkdir()
        if kind != "none":
            stale = write_lock(folder, process_start="1", token="a")
            if kind != "gone":
                second = json.dumps(json.loads(make_record()) | {"process_start": "2"}).encode()
                run_lock.get_successor(stale.path, stale.record).write_bytes(second)
        barrier = threading.Barrier(4)

        def contend(folder=folder, barrier=barrier):
            barrier.wait()
            try:
                return acquire(folder)
            except UsageError:
                return None

        with ThreadPoolExecutor(4) as pool:
            locks = [f.result() for f in [pool.submit(contend) for _ in range(4)]]
        (lock,) = [lock for lock in locks if lock is not None]
        assert [record for _, record in list_holders(lock.path)] == [lock.record]
        assert [path.name for path in folder.iterdir()] == [NAME]
        lock.release()


def test_a_run_that_was_taken_over_ends(tmp_path):
    """Such as one that was stopped for minutes, while another host went on."""
    code = (
        "import sys, time; from pathlib import Path; from unet3d import run_lock;"
        "run_lock.HEARTBEAT_SECONDS = 0.05;"
        "lock = run_lock.acquire_lock(Path(sys.argv[1]), print); lock.start_heartbeat();"
        "print('held', flush=True); time.sleep(99)"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        first = (tmp_path / NAME).stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / NAME).stat().st_mtime_ns > first
        (tmp_path / NAME).unlink()  # somebody tidies up: it is there again
        time.sleep(0.3)
        assert (tmp_path / NAME).exists()
        write_lock(tmp_path)
        assert process.wait(10) == run_lock.EXIT_CODE
        assert "another command has taken over" in process.stderr.read()


def test_the_lock_of_a_launcher_is_handed_over(tmp_path):
    first = acquire(tmp_path)
    second = acquire_lock(tmp_path, print, launcher=os.getpid())
    assert second.is_held()
    assert not first.is_held()
    first.release()
    assert second.is_held()
    second.release()
    assert list(tmp_path.iterdir()) == []
