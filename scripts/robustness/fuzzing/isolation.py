"""Run a command on one input in a process of its own, and say what it did that it may not do."""

import faulthandler
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from stat import S_ISDIR
from tempfile import TemporaryDirectory, gettempdir
from types import SimpleNamespace
from typing import Any

import unet3d.cli.main
from scripts.robustness.corrupted_inputs import fork
from unet3d.cli.error_messages import run_with_error_handling
from unet3d.config.settings.check import parse_check
from unet3d.config.settings.compare import parse_compare
from unet3d.config.settings.doctor import parse_doctor
from unet3d.config.settings.download import parse_download
from unet3d.config.settings.evaluation import parse_evaluation
from unet3d.config.settings.export import parse_export
from unet3d.config.settings.inference import parse_inference
from unet3d.config.settings.lr import parse_lr
from unet3d.config.settings.memory import parse_memory, parse_suggest
from unet3d.config.settings.planning import parse_planning
from unet3d.config.settings.search import parse_search
from unet3d.config.settings.training import parse_training
from unet3d.config.settings.view import parse_view

LIMIT_SECONDS = 60
LIMIT_MIB = 1024
"""That a command may take more than it has before it starts; all valid inputs are tiny."""

PARSERS: dict[str, Callable[[Any], Any]] = {
    "check": parse_check,
    "compare": parse_compare,
    "doctor": parse_doctor,
    "download": parse_download,
    "evaluate": parse_evaluation,
    "export": parse_export,
    "lr": parse_lr,
    "memory": parse_memory,
    "plan": parse_planning,
    "predict": parse_inference,
    "search": parse_search,
    "suggest": parse_suggest,
    "train": parse_training,
    "view": parse_view,
}
"""What reads the config of each command into settings."""

FAILURES = (
    *("hang", "signal", "traceback", "unhandled error", "exit code", "message"),
    *("memory", "foreign file", "network", "process", "library"),
)

PATHS = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), (0,)),
    **dict.fromkeys(("os.chown", "os.utime", "os.mknod"), (0,)),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), (0, 1)),
}
"""Arguments of audit events that are files which are changed."""

EVENTS = {
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto"), "network"),
    **dict.fromkeys(("socket.getaddrinfo", "urllib.Request"), "network"),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"), "process"),
    **dict.fromkeys(("os.startfile", "pty.spawn", "webbrowser.open"), "process"),
}

SYSTEM = ("/proc/self/", "/dev/shm/pym-", f"{gettempdir()}/torchinductor_")
"""Beginnings of files of the process itself: its own, multiprocessing's, torch's caches."""

ACTS, PEAK = ".acts", "peak"
"""File of a work folder in which the audit hook notes what may not happen; what it notes else."""

PRINTED = (".stdout", ".stderr")


@dataclass(frozen=True, kw_only=True)
class Input:
    """A command line, and the files that replace valid ones."""

    kind: str
    words: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    parses_only: bool = False  # end when the config has been read into settings
    writes: str = "out"  # the folder that may be changed; the words may name others
    may_connect: bool = False  # a command that downloads or serves

    @property
    def is_file(self) -> bool:
        """Whether the words are those of a valid command, and a file that it reads is odd."""
        return self.kind in ("checkpoint", "volume")

    def describe(self) -> str:
        """Return the command, and the sizes of the files."""
        files = ", ".join(f"{name} ({len(data):,} bytes)" for name, data in self.files.items())
        return f"{self.kind}: unet3d {' '.join(map(repr, self.words))}; {files or 'no files'}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command did with an input."""

    code: int  # negative: the signal that ended it
    seconds: float
    mib: float  # more than before
    stdout: str
    stderr: str
    acts: Sequence[str]  # of the audit hook: "foreign file: open /x"
    timed_out: bool = False
    is_file: bool = True  # for which no memory may be asked for that cannot be had

    @property
    def verdict(self) -> str:
        """The first failure; `accepted` or `refused` if there is none."""
        return next(self._iter_failures(), "refused" if self.code else "accepted")

    def _iter_failures(self) -> Iterator[str]:
        for act in self.acts:
            yield act.partition(":")[0]
        text = self.stdout + self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("unet3d: ")]
        if self.timed_out:
            yield "hang"
        if self.code < 0:
            yield "signal"
        if "Traceback (most recent call last)" in text:
            yield "traceback"
        if "debug=true shows the traceback" in text:
            yield "unhandled error"
        if self.mib > LIMIT_MIB or (self.is_file and "out of memory: " in text):
            yield "memory"
        if self.code not in (0, 1, 2, 3, 4):
            yield "exit code"
        if (self.code in (2, 3, 4) and not lines) or re.search(
            r"[\0-\x08\x0b-\x1f\x7f-\x9f]", text
        ):
            yield "message"


def run_isolated(item: Input, folder: Path, act: Callable[[], int] | None = None) -> Outcome:
    """Write an input's files to a folder with valid inputs, and run its command there.

    `act` replaces the command.
    """
    for name, content in item.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "out").mkdir(exist_ok=True)
    before = list_files(folder, item.writes)
    run = act or (lambda: run_command(item))

    def watch_and_run() -> int:
        limit = read_status("VmData") + 4 * LIMIT_MIB * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        # pytest has replaced these.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, errors="backslashreplace")
        install_hook(folder, item)
        return run()

    code, seconds, mib, stderr = fork(watch_and_run, folder, LIMIT_SECONDS)
    notes = folder / ACTS
    noted = notes.read_text("utf-8", "replace").splitlines() if notes.exists() else []
    start, *peaks = [int(line.split()[1]) / 2**20 for line in noted if line.startswith(PEAK)] or [0]
    acts = [line for line in noted if not line.startswith(PEAK)]
    after = list_files(folder, item.writes)
    changed = sorted(name for name, _ in before.items() ^ after.items())
    return Outcome(
        code=code,
        seconds=seconds,
        mib=max([mib, *peaks]) - start,
        stdout=(folder / ".stdout").read_text("utf-8", "replace"),
        stderr=stderr,
        acts=[*acts, *(f"foreign file: {name}" for name in dict.fromkeys(changed))],
        timed_out=code == -signal.SIGKILL and seconds >= LIMIT_SECONDS,
        is_file=item.is_file,
    )


def run_command(item: Input) -> int:
    """Run a command as `unet3d` does; `load` is the function of the Python API."""
    command, *words = item.words
    if command == "load":
        return load_checkpoint(words[0])
    if item.is_file:
        composed, folder = compose(item.words)
        run = import_module(f"unet3d.cli.{command}").main
        return run_with_error_handling(lambda: run(composed, folder), debug=False)
    if item.parses_only:
        replace_commands(lambda name, composed, folder: PARSERS[name](composed) and 0)
    return unet3d.cli.main.main(item.words)


@cache
def compose(words: tuple[str, ...]) -> tuple[Any, Path]:
    """Compose a command's config, which takes longer than most of what the command then does."""
    found: list[tuple[Any, Path]] = []
    own = unet3d.cli.main.import_command
    with TemporaryDirectory() as scratch, chdir(scratch):
        replace_commands(lambda _, composed, folder: found.append((composed, folder)) or 0)
        code = unet3d.cli.main.main(words)
        unet3d.cli.main.import_command = own
        assert code == 0
        return found[0][0], found[0][1].relative_to(Path.cwd())


def replace_commands(act: Callable[[str, Any, Path], int]) -> None:
    """Let commands do something else with their config and their folder."""
    cli: Any = unet3d.cli.main
    cli.import_command = lambda name: SimpleNamespace(
        main=partial(act, name), print_sweep_summary=lambda folder: None
    )


def load_checkpoint(path: str) -> int:
    """Load a network and segment an array, with errors as on the command line."""
    import numpy as np

    import unet3d

    def segment() -> int:
        network = unet3d.load(path, device="cpu")
        image = np.zeros((len(network.channels), 8, 8, 8), np.float32)
        network.predict(image, spacing_mm=(1, 1, 1))
        return 0

    return run_with_error_handling(segment, debug=False)


def install_hook(folder: Path, item: Input) -> None:
    """Note what the process does to files outside of a folder, to networks and processes."""
    notes = os.open(folder / ACTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    allowed = os.path.realpath(folder / item.writes)
    inputs = os.path.realpath(folder)
    busy = threading.local()

    def note_peak() -> None:
        os.write(notes, f"{PEAK}: {read_status('VmHWM')}\n".encode())

    def note(kind: str, event: str, arguments: Any) -> None:
        os.write(notes, f"{kind}: {event} {str(arguments)[:300]!r}\n".encode())

    def is_foreign(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path)
        real = os.path.realpath(name)
        inside = real == allowed or real.startswith(f"{allowed}/") or name.startswith(SYSTEM)
        return not inside and real != os.devnull

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(busy, "now", False):
            return
        busy.now = True
        try:
            if event == "open":
                if arguments[0] == "/proc/self/clear_refs":  # it forgets the peak
                    note_peak()
                flags = arguments[2] if isinstance(arguments[2], int) else 0
                writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if writes and is_foreign(arguments[0]):
                    note("foreign file", event, arguments)
            elif event in PATHS:
                exists = event == "os.mkdir" and Path(os.fsdecode(arguments[0])).is_dir()
                if not exists and any(is_foreign(arguments[number]) for number in PATHS[event]):
                    note("foreign file", event, arguments)
            elif event in EVENTS:
                if not item.may_connect or EVENTS[event] != "network":
                    note(EVENTS[event], event, arguments)
                if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
                    raise OSError("no network while fuzzing")
            elif event == "ctypes.dlopen" and "/" in str(arguments[0]):
                is_input = os.path.realpath(str(arguments[0])).startswith(inputs)
                if is_input:
                    note("library", event, arguments)
        finally:
            busy.now = False

    note_peak()
    sys.addaudithook(hook)


def list_files(folder: Path, except_in: str) -> dict[str, tuple[int, int]]:
    """Return size and time of every file, except in one folder."""
    found: dict[str, tuple[int, int]] = {}
    pending = [] if except_in == "." else [folder]
    while pending:
        for path in pending.pop().iterdir():
            name, status = str(path.relative_to(folder)), path.lstat()
            if name in (except_in, ACTS, *PRINTED):
                continue
            if S_ISDIR(status.st_mode):
                pending.append(path)
                found[name] = 0, 0
            else:
                found[name] = status.st_size, status.st_mtime_ns
    return found


def read_status(key: str) -> int:
    """Return bytes of this process, by their name in /proc."""
    text = Path("/proc/self/status").read_text("utf-8")
    match = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
