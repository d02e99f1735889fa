"""Let every call that changes a file fail with every error; each command must end well and go on.

    python -m scripts.robustness.storage_faults              # all, into benchmarks/: hours
    python -m scripts.robustness.storage_faults --count 20   # some of each command; writes nothing
    python -m scripts.robustness.storage_faults --match 'rename.*last' --show

Commands are traced first (fail_calls.c): what they call, and on which file. Then each such call
fails with each error that a full, read-only, broken or remote file system can return: the first
call on a file, the last one, or all. Afterwards the same command is run without faults.

Verdicts: `went on` is exit code 0, with all results or a line for each that is missing. `ended` is
another exit code and one line with the file or folder and what to do. `not met` is a call that a
second run did not make. All others are failures.
"""

import argparse
import ctypes
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch

from scripts.compare_checkpoints import is_equal
from scripts.robustness.corrupted_inputs import fork
from unet3d.checkpoint_file import load_checkpoint
from unet3d.cli.main import main as run_command
from unet3d.cpp_kernels import find_compiler
from unet3d.report.run_report import collect_versions, write_report

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("fail_calls.c")
OUTPUT = ROOT / "benchmarks" / "cpu-storage-faults.json"
SEED = 0
LIMIT_SECONDS = 120

DATA = [
    *(
        "data.root=set",
        "data.cache=cache",
        "data.layout.size=[12,12,12]",
        "data.layout.num_cases=5",
    ),
    *("data.patch_size=[8,8,8]", "data.batch_size=2", "data.patches_per_case=1"),
    *("trainer.accelerator=cpu", "model.width=2", "model.depth=2"),
]
TRAIN = [
    *("train", *DATA, "trainer.enable_progress_bar=false", "resume=auto", "save_every_seconds=0"),
    *("logger=[tensorboard,csv]", "memory.estimate=false", "evaluation.draw_worst=1"),
    *("hydra.run.dir=run", "validation.hd95=false"),
]
COMMANDS = {
    "train": [*TRAIN, "trainer.max_steps=2"],
    "resume": [*TRAIN, "trainer.max_steps=4"],
    "predict": ["predict", "checkpoint=run.ckpt", "input=scans", "output=out", "device=cpu",
                "save_probabilities=true"],
    "evaluate": ["evaluate", "predictions=scans", "references=scans", "output=scores",
                 "draw_worst=1", "images=scans"],
    "export": ["export", "checkpoint=run.ckpt", "format=torch_export", "output=net.pt2",
               "input=scans"],
    "bundle": ["export", "checkpoint=run.ckpt", "format=bundle", "output=bundle", "input=scans"],
    "check": ["check", *DATA, "format=json", "output=check.json"],
    "compare": ["compare", "run", "output=table.txt", "figure=figure.png"],
    "memory": ["memory", *DATA, "view=layers", "format=png", "output=memory.png"],
    "plan": ["plan", *DATA, "measure_time=false", "budget_gib=1", "overwrite=true"],
}  # fmt: skip
NEEDS = {
    "resume": ("run", "set", "cache"),
    "predict": ("run.ckpt", "scans"),
    "evaluate": ("scans",),
    "export": ("run.ckpt", "scans"),
    "bundle": ("run.ckpt", "scans"),
    "check": ("set",),
    "compare": ("run",),
    "memory": ("set",),
    "plan": ("set",),
}
"""What a command finds in its folder."""

INPUTS = ("set", "scans", "run.ckpt")
"""Entries among these that commands only read; scripts.robustness.corrupted_inputs changes them."""

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
BROKEN = (errno.EIO, errno.ESTALE)
ERRORS = {
    "create": (*FULL, *REFUSED, *BROKEN),
    "open": (errno.EACCES, *BROKEN),
    "mkdir": (*FULL, *REFUSED, *BROKEN),
    "write": (*FULL, *BROKEN),
    "close": (*FULL, *BROKEN),  # as network file systems report a full disk
    "fsync": (*FULL, *BROKEN, errno.EINVAL),
    "truncate": (*REFUSED, *BROKEN),
    "rename": (*FULL, *REFUSED, *BROKEN, errno.EXDEV),
    "link": (*FULL, *REFUSED, *BROKEN, errno.EXDEV, errno.EMLINK),
    "unlink": (*REFUSED, *BROKEN, errno.EBUSY),
    "chmod": (errno.EPERM, errno.EROFS),
    "utime": (errno.EPERM, errno.EROFS, errno.ESTALE),
    "flock": (errno.ENOLCK, errno.ENOSYS, errno.EIO),
}
"""Errors by call."""

GOOD = ("went on", "ended", "not met")
UNIMPORTANT = "cache/contents.json"  # digests are computed again
OWN_FILES = (".stdout", ".stderr", ".trace", ".cache", ".hydra")


@dataclass(frozen=True)
class Fault:
    """A call on files that match a pattern, and the error with which it fails."""

    command: str
    call: str
    place: str  # a glob pattern, relative to the folder
    error: int
    first: int  # the call on this file that fails first, from 1
    times: int  # 0: and all later ones

    @property
    def title(self) -> str:
        """Describe the fault in a few words."""
        which = f"from {self.first} on" if self.times == 0 else f"number {self.first}"
        code = errno.errorcode[self.error]
        return f"{self.command}: {self.call} {self.place} {code}, {which}"


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it left."""

    verdict: str
    code: int
    line: str  # the last one on standard error
    seconds: float


def build_library(folder: Path) -> Path:
    """Compile fail_calls.c."""
    compiler, library = find_compiler(), folder / "fail_calls.so"
    if compiler is None:
        sys.exit("scripts.robustness.storage_faults needs a C compiler (gcc, or CXX=...)")
    flags = ["-shared", "-fPIC", "-O1", "-w", "-x", "c", str(SOURCE), "-ldl", "-o", str(library)]
    subprocess.run([compiler, *flags], check=True)
    return library


def run_traced(words: Sequence[str], folder: Path, fault: Fault | None) -> tuple[int, float, str]:
    """Run a command in a folder; return its exit code, seconds, and standard error."""

    def run() -> int:
        library = ctypes.CDLL(None)
        os.environ["XDG_CACHE_HOME"] = str(folder / ".cache")
        trace = os.open(folder / ".trace", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if fault is not None:
            pattern = str(folder / fault.place).encode()
            library.set_fault(fault.call.encode(), pattern, fault.error, fault.first, fault.times)
        library.trace_calls(trace)
        code = run_command(words)
        library.trace_calls(-1)
        (folder / ".modules").write_text("\n".join(sys.modules), "utf-8")
        return code

    code, seconds, _, stderr = fork(run, folder, LIMIT_SECONDS)
    return code, seconds, stderr


def read_trace(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield whether a call was failed, its name, and its path in the folder as a pattern."""
    for line in (folder / ".trace").read_text("utf-8", errors="replace").splitlines():
        verdict, call, path = line.split(" ", 2)
        path = os.path.normpath(path)
        if path.startswith(f"{folder}/"):
            yield verdict, call, get_pattern(path.removeprefix(f"{folder}/"))


def get_pattern(path: str) -> str:
    """Replace what differs between two runs.

    >>> get_pattern("run/.123-last.ckpt"), get_pattern("run/.run.lock-0123456789abcdef")
    ('run/.*-last.ckpt', 'run/.run.lock-*')
    >>> get_pattern("cache/.case_001-0123456789abcdef/label.npy")
    'cache/.case_*-*/label.npy'
    """
    path = re.sub(r"/\.\d+-", "/.*-", "/" + path)[1:]
    path = re.sub(r"[0-9a-f]{16,}", "*", path)
    path = re.sub(r"tfevents\.\S+", "tfevents.*", path)
    path = re.sub(r"-[0-9a-z_]{8}(?=/|$)", "-*", path)  # of tempfile
    return re.sub(r"case_\d+", "case_*", path).removesuffix(" (deleted)")


def list_faults(command: str, folder: Path) -> list[Fault]:
    """Return every fault that a traced command can meet in its folder."""
    counts = Counter((call, place) for _, call, place in read_trace(folder) if call in ERRORS)
    faults = []
    for (call, place), count in counts.items():
        if Path(place).parts[0] in {*OWN_FILES, *INPUTS} or "/#" in place:
            continue
        if call == "close" and ("create", place) not in counts:
            continue
        moments = {(1, 1), (1, 0), (count, 1)} if count > 1 else {(1, 1)}
        faults += [
            Fault(command, call, place, error, *moment)
            for error in ERRORS[call]
            for moment in sorted(moments)
        ]
    return faults


def list_results(folder: Path) -> dict[str, int]:
    """Return the files of a folder as patterns, with the lines of tables."""
    found: dict[str, int] = {}
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.is_file() and not set(Path(name).parts) & {*OWN_FILES[:4], ".modules"}:
            lines = len(file.read_bytes().splitlines()) if file.suffix == ".csv" else 1
            found[get_pattern(name)] = found.get(get_pattern(name), 0) + lines
    found.pop(UNIMPORTANT, None)
    return found


def find_drafts(folder: Path) -> list[str]:
    """Return temporary files and locks."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [
        name
        for name in names
        if (
            name.rpartition("/")[2].startswith(".")
            and not set(Path(name).parts) & {*OWN_FILES, ".modules"}
        )
        or name.endswith(("run.lock", ".part"))
    ]


def find_bad_checkpoint(folder: Path) -> str | None:
    """Return why no checkpoint of a run can be read, if there should be one."""
    for name in ("last.ckpt", "previous.ckpt", "best.ckpt"):
        path = folder / "run" / "checkpoints" / name
        if path.exists():
            try:
                load_checkpoint(path)
            except ValueError as error:
                return str(error)
    return None


def is_named(place: str, text: str) -> bool:
    """Return whether a text names a file, or a folder that it lies in other than the run's."""
    for path in (Path(place), *list(Path(place).parents)[:-2]):
        name = re.sub(r"^\.(\*-)?", "", path.name)
        pattern = re.escape(str(path.with_name(f".*-{name}"))).replace(r"\.\*\-", r"(\.|\.\d+-)?")
        if re.search(pattern.replace(r"\*", "[^/ ]*"), text):
            return True
    draft = re.match(r"\.(.+)-\*/", place)  # of an output folder
    return draft is not None and draft[1] in text


class Experiment:
    """A folder with what the commands need, and with what they write without faults."""

    def __init__(self, scratch: Path):
        self.scratch, self.original = scratch, scratch / "original"
        self.results: dict[str, dict[str, int]] = {}
        self.faults: list[Fault] = []
        self.original.mkdir()

    def prepare(self, commands: Sequence[str]) -> None:
        """Trace every command without faults; the first one makes what others need."""
        for command in ("train", *(name for name in commands if name != "train")):
            folder = self.copy(command)
            code, _, stderr = run_traced(COMMANDS[command], folder, None)
            if code:
                sys.exit(f"{command} failed without a fault: {stderr}")
            self.results[command] = list_results(folder)
            self.faults += list_faults(command, folder) if command in commands else []
            for name in (folder / ".modules").read_text("utf-8").splitlines():
                try:  # once, before all later forks
                    import_module(name)
                except Exception:
                    continue
            if command == "train":
                for name in ("run", "set", "cache"):
                    shutil.copytree(folder / name, self.original / name)
                shutil.copy(folder / "run/checkpoints/last.ckpt", self.original / "run.ckpt")
                (self.original / "scans").mkdir()
                for file in sorted(self.original.glob("set/*/labelsTr/*"))[:2]:
                    shutil.copy(file, self.original / "scans")
            if command == "resume":
                self.weights = self.read_weights(folder)
            shutil.rmtree(folder)

    def copy(self, command: str) -> Path:
        """Return a new folder with what a command needs."""
        folder = Path(tempfile.mkdtemp(prefix=f"{command}-", dir=self.scratch)).resolve()
        for name in NEEDS.get(command, ()):
            source = self.original / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        return folder

    def read_weights(self, folder: Path) -> Any:
        """Return the weights of a run that has ended."""
        return load_checkpoint(folder / "run/checkpoints/last.ckpt", mmap=False)["state_dict"]

    def run(self, fault: Fault) -> Outcome:
        """Run a command with a fault, then without."""
        folder = self.copy(fault.command)
        try:
            code, seconds, stderr = run_traced(COMMANDS[fault.command], folder, fault)
            verdict = self.judge(fault, folder, code, stderr)
            if verdict in GOOD:
                verdict = self.find_lasting_damage(fault, folder) or verdict
        finally:
            shutil.rmtree(folder)
        return Outcome(verdict, code, ["", *stderr.strip().splitlines()][-1], seconds)

    def judge(self, fault: Fault, folder: Path, code: int, stderr: str) -> str:
        """Return how a command took a fault."""
        line = ["", *stderr.strip().splitlines()][-1]
        output = stderr + (folder / ".stdout").read_text("utf-8", errors="replace")
        missing = [
            name
            for name, lines in self.results[fault.command].items()
            if list_results(folder).get(name, 0) < lines
        ]
        bad = find_bad_checkpoint(folder)
        drafts = [] if fault.call == "unlink" else find_drafts(folder)
        verdicts = {
            "not met": not any(v == "fail" for v, _, _ in read_trace(folder)),
            "hang": code == -9,
            "crash": code not in (0, 1, 2, 3, 4),
            "traceback": "Traceback" in output,
            "unexpected": "debug=true" in output,
            f"left {', '.join(drafts)}": bool(drafts),
            f"damaged checkpoint: {bad}": bad is not None,
            f"lost in silence: {', '.join(missing)}": code == 0
            and not all(is_named(name, output) for name in missing),
            "does not name the file": code > 1
            and not is_named(fault.place, line)
            and str(folder / Path(fault.place).parts[0]) not in line,
            "does not say what to do": code > 1 and line.endswith(os.strerror(fault.error)),
            "case without a cause": code == 1 and os.strerror(fault.error) not in output,
        }
        return next((name for name, holds in verdicts.items() if holds), GOOD[code != 0])

    def find_lasting_damage(self, fault: Fault, folder: Path) -> str | None:
        """Run the command without faults; return what is wrong then."""
        words = COMMANDS[fault.command]
        if fault.command in ("export", "bundle"):
            output = folder / words[3].removeprefix("output=")
            output.unlink() if output.is_file() else shutil.rmtree(output, ignore_errors=True)
        code, _, stderr = run_traced(words, folder, None)
        if code:
            return f"does not go on: {code}, {stderr.strip()[-300:]}"
        if drafts := find_drafts(folder):
            return f"left for good: {', '.join(drafts)}"
        if fault.command == "train":
            return None
        if fault.command == "resume" and not is_equal(self.read_weights(folder), self.weights):
            return "goes on with other weights"
        return None


shared: Experiment
"""What a process of the pool runs commands in."""


def share_experiment(experiment: Experiment) -> None:
    """Begin a process of the pool, which `run_shared` runs in."""
    global shared
    shared = experiment


def run_shared(fault: Fault) -> Outcome:
    """Run a command with a fault."""
    return shared.run(fault)


def sample(faults: Sequence[Fault], count: int) -> list[Fault]:
    """Draw `count` faults, of each command its share, of as many calls and places as possible."""
    drawn = []
    for command in dict.fromkeys(fault.command for fault in faults):
        own = [fault for fault in faults if fault.command == command]
        share = max(1, round(count * len(own) / len(faults)))
        shuffled = Random(SEED).sample(own, len(own))
        places: Counter[tuple[str, str]] = Counter()
        turns = {}
        for fault in shuffled:
            places[fault.call, fault.place] += 1
            turns[fault] = places[fault.call, fault.place]
        drawn += sorted(shuffled, key=turns.__getitem__)[:share]
    return drawn[:count]


def format_table(results: Sequence[tuple[Fault, Outcome]]) -> str:
    """Count verdicts, one line per command."""
    lines = []
    for command in [*dict.fromkeys(fault.command for fault, _ in results), "all"]:
        verdicts = [o.verdict for f, o in results if command in (f.command, "all")]
        counts = Counter(verdict if verdict in GOOD else "bad" for verdict in verdicts)
        counted = ", ".join(f"{counts[name]} {name}" for name in (*GOOD, "bad"))
        lines.append(f"{command:9} {len(verdicts):5} faults: {counted}")
    return "\n".join(lines)


def build_report(cases: Sequence[Mapping[str, Any]], total: int, command: str) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        "command": command,
        "seed": SEED,
        "versions": collect_versions(),
        "faults": total,
        "tried": len(cases),
        "verdicts": dict(Counter(case["verdict"] for case in cases)),
        "cases": list(cases),
    }


def write_results(
    results: Sequence[tuple[Fault, Outcome]], total: int, path: Path, *, update: bool
) -> None:
    """Write the result file, or replace these results in it."""
    cases = {
        fault.title: {"fault": fault.title, "exit": outcome.code, "verdict": outcome.verdict}
        for fault, outcome in results
    }
    command = shlex.join(["python", "-m", "scripts.robustness.storage_faults", *sys.argv[1:]])
    if update:
        old = json.loads(path.read_text("utf-8"))
        cases, command = {case["fault"]: case for case in old["cases"]} | cases, old["command"]
        total = old["faults"]
    write_report(build_report(list(cases.values()), total, command), path)


def main() -> int:
    """Run all faults, or some."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.robustness.storage_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, help="draw this many faults, some of each command")
    parser.add_argument("--match", default="", help="regular expression for faults")
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=COMMANDS)
    parser.add_argument("--show", action="store_true", help="print how each command ended")
    parser.add_argument(
        "--write", action="store_true", help="write the results of some faults, too"
    )
    parser.add_argument("--update", action="store_true", help="replace the results of some")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "LD_PRELOAD": str(build_library(Path(folder)))}
            command = [sys.executable, "-m", "scripts.robustness.storage_faults", *sys.argv[1:]]
            return subprocess.run(command, env=environment, check=False).returncode
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        experiment = Experiment(Path(scratch).resolve())
        experiment.prepare(options.commands)
        total = len(experiment.faults)
        faults = [f for f in experiment.faults if re.search(options.match, f.title)]
        faults = sample(faults, options.count) if options.count else faults
        print(f"{len(faults)} of {total} faults", flush=True)
        results: list[tuple[Fault, Outcome]] = []
        # Forked, since a child has what the experiment has imported.
        processes = get_context("fork")
        with ProcessPoolExecutor(options.jobs, processes, share_experiment, (experiment,)) as pool:
            for fault, outcome in zip(faults, pool.map(run_shared, faults), strict=True):
                results.append((fault, outcome))
                if options.show or outcome.verdict not in GOOD:
                    line = outcome.line[:300]
                    print(f"{outcome.verdict} ({outcome.code}): {fault.title}: {line}", flush=True)
    print(format_table(results))
    if options.write or options.update or len(faults) == total:
        write_results(results, total, options.output, update=options.update)
    return int(any(outcome.verdict not in GOOD for _, outcome in results))


if __name__ == "__main__":
    sys.exit(main())
