"""Let one command write to a run folder: a lock with a heartbeat, for hosts that share a disk.

The lock is a file, because not every network file system has locks, and some have them per host.
It is created exclusively and says who holds it; its modification time is the heartbeat. Whether a
process on this host is gone is known at once. A process elsewhere is gone if its heartbeat stops,
which is watched here for two beats at least: clocks of two hosts are never compared, and may jump.
"""

import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2s
from pathlib import Path
from typing import Any
from uuid import uuid4

from unet3d.atomic_write import atomic_write, name_file
from unet3d.errors import UsageError
from unet3d.text import escape_unprintable

NAME = "run.lock"

HEARTBEAT_SECONDS = 5.0

STALE_SECONDS = 60.0
"""Time without a heartbeat after which a lock of another host may be taken over."""

POLL_SECONDS = 0.5

EXIT_CODE = 4
"""Exit code of a run whose lock was taken over: another one writes to its folder now."""

Log = Callable[[str], None]


class NotALockError(OSError):
    """Something else than a file has the name of a lock."""


class RunLock:
    """The lock of a folder, held by this process until `release`."""

    def __init__(self, folder: Path, record: bytes):
        self.path, self.record = folder / NAME, record
        self._released = threading.Event()
        self._mutex = threading.Lock()  # or a heartbeat could write a lock that was released

    def start_heartbeat(self) -> None:
        """Renew the lock from a thread, which a long validation does not stop."""
        threading.Thread(target=self._beat, daemon=True).start()

    def is_held(self) -> bool:
        """Return whether this process still holds the lock."""
        chain = list_holders(self.path)
        return bool(chain) and chain[-1][1] == self.record

    def release(self) -> None:
        """Remove the lock, unless another process has taken it over."""
        self._released.set()
        for _ in range(2):  # a file that an NFS server has replaced (ESTALE) is found again
            with self._mutex, suppress(OSError):
                if self.is_held():
                    self.path.unlink()
                get_draft(self.path, self.record).unlink(missing_ok=True)  # if it could not be
                return

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with self._mutex, suppress(OSError):  # a network file system may be away for a while
                if self._released.is_set():
                    return
                if self.is_held():
                    os.utime(self.path)
                elif not self.path.parent.is_dir() or create_exclusively(self.path, self.record):
                    pass  # somebody has moved the folder, or deleted the lock
                elif not self.is_held():
                    line = f"unet3d: another command has taken over {self.path.parent}, so this "
                    with suppress(OSError):
                        os.write(2, f"{line}one ends\n".encode())
                    os._exit(EXIT_CODE)


def acquire_lock(folder: Path, log: Log, *, launcher: int | None = None) -> RunLock:
    """Lock an existing folder; a UsageError names the process that holds it.

    A lock whose process is gone is taken over, and that of `launcher`, which started this process.
    Of two processes that want to take it over, one gets it: the lock is succeeded by a file that
    has its digest in its name and is created exclusively, too.
    """
    lock = RunLock(folder, make_record())
    while not create_exclusively(lock.path, lock.record):
        try:
            holders = list_holders(lock.path)
        except NotALockError as error:
            raise UsageError(
                f"{error.filename} is not a regular file, where a run has its lock: remove it"
            ) from error
        if not holders:
            continue  # released in the meantime
        file, record = holders[-1]
        known = parse_record(record)
        is_ours = launcher is not None and known.get("pid") == launcher and is_running(known)
        if not is_ours and not is_stale(file, record, known, log):
            since = escape_unprintable(f", since {known['started']}" if "started" in known else "")
            raise UsageError(
                f"{folder} is in use by {describe_process(known)}{since}: wait until it has ended, "
                "or set another hydra.run.dir="
            )
        successor = get_successor(lock.path, record)
        if not create_exclusively(successor, lock.record):
            continue  # another process was faster
        if lock.is_held():
            try:
                with atomic_write(lock.path) as draft:
                    draft.write_bytes(lock.record)
                for name, _ in holders[1:]:
                    name.unlink(missing_ok=True)
            finally:
                successor.unlink(missing_ok=True)
            break
        successor.unlink(missing_ok=True)  # the lock has been taken over and replaced
    remove_leftovers(folder)
    return lock


def list_holders(path: Path) -> list[tuple[Path, bytes]]:
    """Return the lock's file and content, and those of the files that succeed it."""
    holders: list[tuple[Path, bytes]] = []
    file = path
    while True:
        try:
            record = read_lock(file)
        except FileNotFoundError:
            return holders
        holders.append((file, record))
        file = get_successor(path, record)


def read_lock(file: Path) -> bytes:
    """Return the content of a lock; a pipe would block, and a link may lead nowhere."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise NotALockError(errno.EINVAL, "not a regular file", str(file))
    return file.read_bytes()


def get_successor(path: Path, record: bytes) -> Path:
    """Return the file that succeeds a lock with this content."""
    return path.with_name(f".{NAME}-{blake2s(record, digest_size=8).hexdigest()}")


def get_draft(path: Path, record: bytes) -> Path:
    """Return the file that a lock with this content is written to before it gets its name."""
    return path.with_name(f".{NAME}-{blake2s(record, digest_size=16).hexdigest()}")


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts and successors of processes that were killed or could not remove them."""
    for file in folder.glob(f".{NAME}-*"):
        with suppress(OSError):
            if is_running(parse_record(read_lock(file))) is False:
                file.unlink()


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create a file with its content, unless it exists; return whether it was created."""
    draft = get_draft(path, content)
    try:
        with name_file(path):
            draft.write_bytes(content)
        try:
            os.link(draft, path)
        except FileExistsError:
            return draft.stat().st_nlink == 2  # NFS may repeat a request that has succeeded
        except OSError:  # a file system without hard links
            try:
                handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return False
            try:
                with name_file(path), os.fdopen(handle, "wb") as file:
                    file.write(content)
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
        return True
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def make_record() -> bytes:
    """Describe this process so that others can tell whether it still runs."""
    pid = os.getpid()
    content = {
        "pid": pid,
        "host": socket.gethostname(),
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        **identify_kernel(),
        "process_start": read_process(pid)[1],
        "token": uuid4().hex,
    }
    return json.dumps(content).encode()


def parse_record(record: bytes) -> dict[str, Any]:
    """Return the content of a lock; nothing is known of one that is not a JSON object."""
    try:
        content = json.loads(record)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def describe_process(known: dict[str, Any]) -> str:
    """Return the process that holds a lock, as a terminal may show it."""
    pid, host = known.get("pid", "?"), known.get("host", "an unknown host")
    return escape_unprintable(f"process {pid} on {host}")


@cache
def identify_kernel() -> dict[str, str | None]:
    """Return what processes that see each other's ids have in common; containers differ."""
    boot = namespace = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return {"boot": boot, "pid_namespace": namespace}


def read_process(pid: int) -> tuple[str, str | None]:
    """Return the state of a process and when it started; an empty state if there is none."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()  # the name of a process is any bytes
    except OSError:
        return "", None
    fields = content.rpartition(b")")[2].decode().split()
    return fields[0], fields[19]


def is_running(known: dict[str, Any]) -> bool | None:
    """Return whether the process of a lock runs; None if that cannot be seen from here."""
    pid, here = known.get("pid"), identify_kernel()
    if type(pid) is not int or pid <= 0:
        return None
    if None not in here.values():
        if any(known.get(key) != value for key, value in here.items()):
            return None
        state, start = read_process(pid)
        return state not in ("", "Z", "X") and start == known.get("process_start")
    if os.name != "posix" or known.get("host") != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_stale(file: Path, record: bytes, known: dict[str, Any], log: Log) -> bool:
    """Return whether the process of a lock is gone; watch for its heartbeat if need be."""
    running = is_running(known)
    if running is not None:
        return not running
    beat = read_heartbeat(file, record)
    if beat is None:
        return True  # released: nothing is in the way
    left = STALE_SECONDS - max(0.0, read_clock(file.parent) - beat)
    left = max(left, 2 * HEARTBEAT_SECONDS)  # the file system's clock may have jumped
    log(
        f"{file.parent} is in use by {describe_process(known)}: waiting up to {left:.0f} s for a "
        "sign of life"
    )
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, left))
        if read_heartbeat(file, record) != beat:
            return read_heartbeat(file, record) is None
    return True


def read_heartbeat(file: Path, record: bytes) -> float | None:
    """Return the time of a lock's last heartbeat by the file system's clock; None if it is gone."""
    try:
        with file.open("rb") as stream:  # NFS asks the server when a file is opened
            return os.fstat(stream.fileno()).st_mtime if stream.read() == record else None
    except FileNotFoundError:
        return None


def read_clock(folder: Path) -> float:
    """Return the time by the clock of a folder's file system."""
    probe = folder / f".{NAME}-{uuid4().hex}"
    try:
        probe.write_bytes(b"")
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
