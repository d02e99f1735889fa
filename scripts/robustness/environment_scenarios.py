"""The scenarios of scripts.robustness.environments, each a sentence and a few lines."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from scripts.chaos.runs import is_running, list_children
from scripts.compare_checkpoints import is_equal
from scripts.robustness.scenario import (
    COMMANDS,
    DATA,
    INPUTS,
    ROOT,
    SHORT,
    TRAIN,
    TRAIN_HERE,
    Failure,
    Folder,
    NotTried,
    Started,
    read_weights,
    scenario,
)
from unet3d.cpp_kernels import find_compiler
from unet3d.run_lock import make_record

MIB = 2**20
OTHER_USER = 12345
DAY_SECONDS = 86400
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 143, "SIGHUP": 143}

MOMENTS: dict[str, str | float] = {
    "imports": 0.4,
    "later imports": 2.0,
    "preprocessing": "preprocessing",
    "the estimate": "UNet3D",
    "its first epoch": "epoch 1",
    "its last epoch": "epoch 2",
    "the final evaluation": "evaluating",
    "writing its report": "Dice, mean",
}
"""When a training is interrupted: after seconds, or once it has printed a text."""

OTHER_SIGNALS = {1: "SIGINT", 3: "SIGHUP", 6: "SIGUSR1"}
"""Signals besides SIGTERM, by the position of their moment."""


# Signals


def expect_same_weights(folder: Folder, *names: str) -> None:
    """Compare two runs in a folder."""
    first, second = (read_weights(folder.path / n / "checkpoints/last.ckpt") for n in names)
    if not is_equal(first, second):
        raise Failure("ended with other weights")


def interrupt(folder: Folder, words: Sequence[str], number: int, moment: str | float) -> int | None:
    """Send a signal at a moment and judge the end; return the exit code."""
    started = folder.start(words)
    if isinstance(moment, str):
        started.wait_for(moment)
    else:
        time.sleep(moment)
    started.send(number)
    name = signal.Signals(number).name
    ended = started.wait()
    may_have_ended = isinstance(moment, float) or moment in [*MOMENTS.values()][-2:]
    if (number == signal.SIGHUP and words[0] == "train") or (ended.code == 0 and may_have_ended):
        folder.expect(ended, 0)
    else:
        folder.expect(ended, CODES[name], says=f"interrupted by {name}")
    return ended.code


def add_interrupted_training(name: str, when: str, moment: str | float) -> None:
    does = "goes on after" if name == "SIGHUP" else "ends on"

    @scenario(f"a training {does} {name} during {when}, and resumes exactly")
    def _(folder: Folder) -> None:
        interrupt(folder, TRAIN_HERE, getattr(signal, name), moment)
        folder.finish_training()
        if not (folder.path / "run/evaluation/evaluation.json").exists():
            raise Failure("the resumed run was not evaluated")


for position, (when, moment) in enumerate(MOMENTS.items()):
    add_interrupted_training("SIGTERM", when, moment)
    if position in OTHER_SIGNALS:
        add_interrupted_training(OTHER_SIGNALS[position], when, moment)


def add_interrupted_command(command: str, name: str, delay: float) -> None:
    @scenario(f"{command} ends on {name} after {delay} s, and succeeds when it is run again")
    def _(folder: Folder) -> None:
        folder.add(*INPUTS, "run")
        interrupt(folder, COMMANDS[command], getattr(signal, name), delay)
        folder.expect(folder.run(COMMANDS[command]), 0)


for command, name, delay in (
    *(("predict", "SIGTERM", 4.5), ("predict", "SIGHUP", 1.0), ("evaluate", "SIGINT", 3.0)),
    *(("check", "SIGUSR1", 2.5), ("plan", "SIGTERM", 4.0), ("export", "SIGINT", 5.0)),
    ("compare", "SIGTERM", 1.5),
):
    add_interrupted_command(command, name, delay)


@scenario("predict with devices=2 ends all of its processes on SIGTERM, and on Ctrl-C to all")
def _(folder: Folder) -> None:
    folder.add(*INPUTS)
    for number in (signal.SIGTERM, signal.SIGINT):
        started = folder.start([*COMMANDS["predict"], "devices=2"])
        deadline = time.monotonic() + 60
        while len(list_children(started.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1)
        children = list_children(started.pid)
        if number == signal.SIGINT:
            os.killpg(started.pid, number)
        else:
            started.send(number)
        folder.expect(started.wait(60), CODES[signal.Signals(number).name])
        deadline = time.monotonic() + 5
        while left := [child for child in children if is_running(child)]:
            if time.monotonic() > deadline:
                raise Failure(f"left {len(left)} processes")
            time.sleep(0.1)
    folder.expect(folder.run(COMMANDS["predict"]), 0)


@scenario("a training ignores a second SIGTERM while it ends, and resumes exactly")
def _(folder: Folder) -> None:
    for moment in ("epoch 1", "evaluating"):
        started = folder.start(TRAIN_HERE)
        started.wait_for(moment)
        started.send(signal.SIGTERM)
        with suppress(ProcessLookupError):
            started.send(signal.SIGTERM)
        folder.expect(started.wait(), 0, 143)
    folder.finish_training()


@scenario("a second Ctrl-C ends a training at once, and it resumes exactly")
def _(folder: Folder) -> None:
    started = folder.start(TRAIN_HERE)
    started.wait_for("epoch 1")
    started.send(signal.SIGINT)
    started.send(signal.SIGINT)
    folder.expect(started.wait(), 130)
    folder.finish_training()


def add_paused_training(title: str, words: Sequence[str]) -> None:
    @scenario(f"a training {title} goes on exactly after SIGSTOP and SIGCONT")
    def _(folder: Folder) -> None:
        started = folder.start([*TRAIN_HERE, *SHORT, *words])
        started.wait_for("epoch 1")
        os.killpg(started.pid, signal.SIGSTOP)
        time.sleep(2)
        os.killpg(started.pid, signal.SIGCONT)
        folder.expect(started.wait(), 0)
        folder.finish_training([*TRAIN_HERE, *SHORT, *words])


add_paused_training("without data workers", ["data.num_workers=0"])
add_paused_training("with data workers", ["data.num_workers=2"])


@scenario("a training of two ranks goes on exactly when one was stopped for less than the timeout")
def _(folder: Folder) -> None:
    words = [*TRAIN, *SHORT, "trainer.devices=2"]
    folder.expect(folder.run([*words, "hydra.run.dir=reference"]), 0)
    started = folder.start([*words, "hydra.run.dir=run"])
    started.wait_for("epoch 1")
    ranks = sorted(list_children(started.pid))
    for rank in ranks[-1:]:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGSTOP)
            time.sleep(2)
            os.kill(rank, signal.SIGCONT)
    folder.expect(started.wait(), 0)
    expect_same_weights(folder, "run", "reference")


WORKERS = [*TRAIN_HERE, *SHORT, "data.num_workers=1", "trainer.max_steps=400"]


def signal_worker(folder: Folder, number: int, words: Sequence[str]) -> Started:
    """Start a training and send a signal to its data workers once they work."""
    started = folder.start(words)
    started.wait_for("epoch 1")
    for worker in list_children(started.pid):
        with suppress(ProcessLookupError):
            os.kill(worker, number)
    return started


@scenario("a training says what to do when its data workers are killed, and resumes exactly")
def _(folder: Folder) -> None:
    words = [*WORKERS, "trainer.max_steps=30"]
    folder.expect(folder.run([*words, "hydra.run.dir=reference"]), 0)
    started = signal_worker(folder, signal.SIGKILL, words)
    folder.expect(started.wait(), 4, says="killed by SIGKILL, usually because memory ran out")
    folder.expect(folder.run(words), 0)
    expect_same_weights(folder, "run", "reference")


@scenario("a training ends when one of its two data workers is killed, and resumes exactly")
def _(folder: Folder) -> None:
    words = [*WORKERS, "data.num_workers=2", "trainer.max_steps=30"]
    folder.expect(folder.run([*words, "hydra.run.dir=reference"]), 0)
    started = folder.start(words)
    started.wait_for("epoch 1")
    os.kill(max(list_children(started.pid)), signal.SIGKILL)
    folder.expect(started.wait(), 4, says="killed by SIGKILL, usually because memory ran out")
    folder.expect(folder.run(words), 0)
    expect_same_weights(folder, "run", "reference")


@scenario("a training goes on when its data workers receive SIGTERM, and ends on its own")
def _(folder: Folder) -> None:
    started = signal_worker(folder, signal.SIGTERM, WORKERS)
    time.sleep(1)
    started.send(signal.SIGTERM)
    folder.expect(started.wait(), 143, says="resume with")


@scenario("a second Ctrl-C ends a training whose data workers are stopped, and it resumes")
def _(folder: Folder) -> None:
    started = signal_worker(folder, signal.SIGSTOP, WORKERS)
    time.sleep(1)
    for _ in range(2):
        started.send(signal.SIGINT)
        time.sleep(0.2)
    folder.expect(started.wait(60), 130)
    folder.expect(folder.run([*WORKERS, "trainer.max_steps=6"]), 0)


# Limits


def limit(**limits: int) -> Callable[[], None]:
    """Return a function that lowers resource limits of a process that is started."""

    def lower() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

    return lower


LIMITS: dict[str, tuple[dict[str, int], tuple[int, ...], str]] = {
    "64 open files": ({"NOFILE": 64}, (0,), ""),
    "16 open files": ({"NOFILE": 16}, (0, 2, 4), "open files|Too many"),
    "1 GiB of addresses": ({"AS": 1024 * MIB}, (3,), "out of memory"),
    "3 GiB of addresses": ({"AS": 3072 * MIB}, (0, 3, 4), ""),
    "200 MiB of data": ({"DATA": 200 * MIB}, (3,), "ulimit -d"),
    "500 MiB of data": ({"DATA": 500 * MIB}, (0, 3, 4), "memory"),
    "files of 20 kB": ({"FSIZE": 20_000}, (4,), "ulimit -f"),
    "a stack of 256 KiB": ({"STACK": 256 * 1024}, (0,), ""),
}


def add_limit(title: str, limits: dict[str, int], codes: tuple[int, ...], says: str) -> None:
    @scenario(f"a training with a limit of {title} goes on or names it, and succeeds without it")
    def _(folder: Folder) -> None:
        words = [*TRAIN_HERE, "data.num_workers=1"]
        ended = folder.run(words, before=limit(**limits))
        folder.expect(ended, *codes, says=says if ended.code else "")
        folder.finish_training(words)


for title, (limits, codes, says) in LIMITS.items():
    add_limit(title, limits, codes, says)


def as_other_user() -> list[str]:
    """Return a prefix that starts a command as a user without a name; it may read all files."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        raise NotTried("needs root and setpriv")
    user = [f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", *user, *rights]


NO_USER: dict[str, str | None] = {"USER": None, "LOGNAME": None, "HOME": None}


def add_other_user(title: str, words: Sequence[str], before: Callable[[], None] | None) -> None:
    @scenario(f"a training as a user without a name {title} succeeds or says why")
    def _(folder: Folder) -> None:
        folder.path.chmod(0o777)
        environment = {**NO_USER, "XDG_CACHE_HOME": None}
        command = [*TRAIN_HERE, *words]
        ended = folder.run(command, environment, prefix=as_other_user(), before=before)
        folder.expect(ended, *((0,) if before is None else (0, 3, 4)))
        folder.finish_training(command)


add_other_user("or home", [], None)
for count in (4, 5, 6, 8):  # the iterator, its workers and their threads fail
    add_other_user(f"and {count} processes", ["data.num_workers=2"], limit(NPROC=count))


@scenario("a training in a cgroup of 400 MiB goes on or says that memory ran out, and resumes")
def _(folder: Folder) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"unet3d-{os.getpid()}-{folder.path.name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(400 * MIB))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise NotTried(f"no memory cgroup can be made here: {error.strerror}") from error

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        ended = folder.run([*TRAIN_HERE, "data.num_workers=1"], before=join)
        if ended.code != -signal.SIGKILL:  # of the whole training, which cannot say anything
            folder.expect(ended, 0, 3, 4)
        folder.finish_training()
    finally:
        group.rmdir()


# Variables


ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "without HOME and TERM, in one column and a strange time zone": {
        **{"HOME": None, "XDG_CACHE_HOME": None, "TERM": None},
        **{"COLUMNS": "1", "LINES": "1", "TZ": "XXX-25:61"},
    },
    "with a HOME that cannot be written, TMPDIR=FILE and variables of a SLURM job": {
        **{"HOME": "/proc", "XDG_CACHE_HOME": None, "TMPDIR": "/etc/hostname"},
        **{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        **{"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NAME": "bash"},
        **{"SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": ""},
    },
    "with LC_ALL=POSIX, without UTF-8, and with OMP_NUM_THREADS=0": {
        **{"LC_ALL": "POSIX", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        **{"PYTHONIOENCODING": None, "OMP_NUM_THREADS": "0"},
    },
    "with a missing TMPDIR, PYTHONIOENCODING=ascii and OMP_NUM_THREADS=many": {
        **{"TMPDIR": "/no/such/folder", "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "many"},
    },
}


def add_environment(title: str, environment: dict[str, str | None]) -> None:
    @scenario(f"a training {title} ends as elsewhere")
    def _(folder: Folder) -> None:
        folder.expect(folder.run(TRAIN_HERE, environment), 0)
        if "OMP_NUM_THREADS" in environment:  # no number: as many threads as without it
            without = {"OMP_NUM_THREADS": None}
            folder.expect(folder.run([*TRAIN, "hydra.run.dir=same"], without), 0)
            folder.compare_weights("run", folder.path / "same/checkpoints/last.ckpt")
        else:
            folder.finish_training()


for title, environment in ENVIRONMENTS.items():
    add_environment(title, environment)


@scenario("commands name a variable of a launcher that is not a number")
def _(folder: Folder) -> None:
    ended = folder.run(TRAIN_HERE, {"RANK": "x", "WORLD_SIZE": "y"})
    folder.expect(ended, 2, says="variable RANK")


@scenario("a training with umask 077 and a closed standard input writes files for its user alone")
def _(folder: Folder) -> None:
    def change() -> None:
        os.umask(0o077)
        os.close(0)

    folder.expect(folder.run([*TRAIN_HERE, *SHORT], before=change), 0)
    for path in (folder.path / "run", *(folder.path / "run").rglob("*")):
        if path.stat().st_mode & 0o077:
            raise Failure(f"{path.relative_to(folder.path)} can be read by others")


@scenario("commands say that their working folder was deleted")
def _(folder: Folder) -> None:
    gone = folder.path / "gone"
    for command in ("train", "predict", "check"):
        gone.mkdir()
        ended = folder.run(
            COMMANDS[command], before=lambda: shutil.rmtree(gone), working_folder=gone
        )
        folder.expect(ended, 2, says="working folder")


# Other commands in the same folder


LONG = [*TRAIN_HERE, *SHORT, "trainer.max_steps=100000"]


@scenario("a container with the same process ids is refused a folder while its run lives")
def _(folder: Folder) -> None:
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.getuid() != 0 or subprocess.run([*space, "true"], check=False).returncode:
        raise NotTried("needs root and unshare")
    first = folder.start(LONG, prefix=space)
    first.wait_for("epoch 1")
    second = folder.run(LONG, prefix=space)
    if second.code != 2 or "is in use by process" not in second.output:
        raise Failure(f"the second one ended with {second.code}: {second.last_line}")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    folder.expect(folder.run(TRAIN_HERE, prefix=space), 0, says="waiting up to")


@scenario("a lock of another host stays while its heartbeat goes on, though a clock jumped a day")
def _(folder: Folder) -> None:
    lock = folder.path / "run" / "run.lock"
    lock.parent.mkdir()
    record = make_record().decode().replace(socket.gethostname(), "elsewhere")
    lock.write_text(record.replace('"boot": "', '"boot": "another-'))
    past = time.time() - DAY_SECONDS
    os.utime(lock, (past, past))
    started = folder.start(TRAIN_HERE)
    started.wait_for("waiting up to")
    time.sleep(1)
    with suppress(FileNotFoundError):
        os.utime(lock)
    ended = started.wait()
    lock.unlink(missing_ok=True)
    folder.expect(ended, 2, says="is in use by process")
    folder.finish_training()


@scenario("one of two sweeps that begin in the same folder at once is refused")
def _(folder: Folder) -> None:
    words = [*TRAIN, *SHORT, "-m", "seed=0,1", "hydra.sweep.dir=sweep", "trainer.max_steps=2"]
    both = [folder.start(words) for _ in range(2)]
    ended = sorted((started.wait() for started in both), key=lambda e: e.code)
    folder.expect(ended[0], 0, says="2 of 2 done")
    folder.expect(ended[1], 2, says="sweep is in use by process")
    folder.expect(folder.run(words), 0)


@scenario("a sweep that was interrupted goes on with the same command")
def _(folder: Folder) -> None:
    words = [*TRAIN, *SHORT, "-m", "seed=0,1", "hydra.sweep.dir=sweep", "trainer.max_steps=2"]
    started = folder.start(words)
    started.wait_for("epoch 1")
    started.send(signal.SIGTERM)
    folder.expect(started.wait(), 143, says="resume with the same command")
    folder.expect(folder.run(words), 0, says="2 of 2 done")


# Clocks


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) {
  static int (*real)(clockid_t, struct timespec *);
  static long begun;
  struct timespec now;
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  real(CLOCK_MONOTONIC, &now);
  if (!begun) begun = now.tv_sec;
  return now.tv_sec - begun < atol(getenv("JUMP_AFTER")) ? 0 : atol(getenv("JUMP_SECONDS"));
}
int clock_gettime(clockid_t id, struct timespec *ts) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, ts);
  if (!code && id == CLOCK_REALTIME) ts->tv_sec += jump();
  return code;
}
int gettimeofday(struct timeval *tv, void *zone) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  tv->tv_sec = ts.tv_sec;
  tv->tv_usec = ts.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (at) *at = ts.tv_sec;
  return ts.tv_sec;
}
"""


def add_clock(title: str, seconds: int) -> None:
    @scenario(f"a training whose clock jumps a day {title} keeps its time limit and ends exactly")
    def _(folder: Folder) -> None:
        compiler, library = find_compiler(), folder.path / "clock.so"
        if compiler is None:
            raise NotTried("needs a C compiler")
        flags = ["-shared", "-fPIC", "-x", "c", "-", "-ldl", "-o", str(library)]
        subprocess.run([compiler, *flags], input=CLOCK, text=True, check=True)
        preload: dict[str, str | None] = {"LD_PRELOAD": str(library)}
        for after in (0, 6):
            jump = {**preload, "JUMP_AFTER": str(after), "JUMP_SECONDS": str(seconds)}
            words = [*TRAIN_HERE, "trainer.max_time=00:01:00:00", f"hydra.run.dir=run{after}"]
            ended = folder.run([*words, "save_every_seconds=1"], jump)
            folder.expect(ended, 0)
            steps = read_weights(folder.path / f"run{after}/checkpoints/last.ckpt")[1]
            if steps != 6:
                raise Failure(f"ended after {steps} steps")


add_clock("forward", DAY_SECONDS)
add_clock("back", -DAY_SECONDS)


# Names


NAMES = [
    *(248 * "a", 120 * "é", "é\udcff", "-dash", "a b", "a=b", "[x]", "{y}${z}", "'q'", 'd"q'),
    *("a\nb", "$\\frac$", "%41", "#h", "\x1b[31mred", "\u202ereversed"),
]


def add_named_copies(folder: Folder, *kinds: str) -> None:
    for kind in kinds:
        folder.add(kind)
        source = min((folder.path / kind).glob("*.gz"))
        for name in NAMES:
            shutil.copy(source, folder.path / kind / f"{name}.nii.gz")


@scenario("predict writes a file for every name that a scan can have")
def _(folder: Folder) -> None:
    folder.add("run.ckpt")
    add_named_copies(folder, "scans")
    folder.expect(folder.run([*COMMANDS["predict"], "save_probabilities=true"]), 0)
    scans = {path.name for path in (folder.path / "scans").iterdir()}
    if scans - {path.name for path in (folder.path / "out").iterdir()}:
        raise Failure("a scan has no output")


@scenario("evaluate scores and draws a case of every name, as JSON, CSV, PNG and HTML")
def _(folder: Folder) -> None:
    add_named_copies(folder, "scans", "labels")
    words = [*COMMANDS["evaluate"], "draw_worst=30"]
    folder.expect(folder.run(words), 0)
    if len(list((folder.path / "scores/worst").iterdir())) != len(NAMES) + 3:
        raise Failure("a case has no figure")


@scenario("check, plan and train take cases of every name")
def _(folder: Folder) -> None:
    add_named_copies(folder, "scans", "labels")
    files = ["data.images=scans/*.nii.gz", "data.labels=labels/*.nii.gz"]
    data = ["data=pairs", "data.root=.", "data.num_classes=4", *files]
    data += [word for word in DATA if ".layout." not in word and ".root" not in word]
    for command in ("check", "plan"):
        words = [w for w in COMMANDS[command] if w not in DATA]
        folder.expect(folder.run([*words, *data]), 0, 1)  # all copies hold the same voxels
    words = [w for w in TRAIN_HERE if w not in DATA]
    folder.expect(folder.run([*words, *data, "evaluation.draw_worst=30"]), 0)


@scenario("a run folder may have any name, and a long path; compare, predict and resume find it")
def _(folder: Folder) -> None:
    folder.add("scans")
    deep = folder.path.joinpath(*(200 * letter for letter in "abcdefghijklmno"))
    for name in ("é\udcff b=[{$c", str(deep)):
        target = name if name.startswith("/") else str(folder.path / name)
        quoted = "'" + target.replace("'", "\\'") + "'"
        words = [w for w in TRAIN_HERE if "run.dir" not in w] + [f"hydra.run.dir={quoted}"]
        folder.expect(folder.run([*words, "trainer.max_steps=2"]), 0)
        folder.expect(folder.run(words), 0)
        folder.expect(folder.run(["compare", target, "figure=figure.png"]), 0)
        checkpoint = f"checkpoint='{target}/checkpoints/last.ckpt'"
        folder.expect(folder.run([*COMMANDS["predict"], checkpoint, "overwrite=true"]), 0)


@scenario("a path that is too long is refused with one line")
def _(folder: Folder) -> None:
    folder.add("scans", "run.ckpt")
    names = {
        "/".join(40 * [150 * "a"]): "at most 4,096 characters",
        300 * "a": "File name too long: shorten",
    }
    for command, key in (("train", "hydra.run.dir"), ("predict", "output"), ("check", "output")):
        words = [w for w in COMMANDS[command] if not w.startswith(f"{key}=")]
        for name, says in names.items():
            ended = folder.run([*words, f"{key}={name}"])
            folder.expect(ended, 2, says=says)
            if "\n" in ended.output.strip():
                raise Failure(f"more than one line: {ended.output[:200]}")


if sys.platform != "linux":
    raise SystemExit(f"scripts.robustness.environments needs Linux ({ROOT})")
