"""Commands survive inputs drawn at random, and what draws them would notice if they did not."""

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.robustness import fuzz
from scripts.robustness.fuzzing import isolation
from scripts.robustness.fuzzing.isolation import FAILURES, Input, run_isolated
from scripts.robustness.fuzzing.volumes import draw_volumes
from unet3d.cli.error_messages import run_with_error_handling

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_input_drawn_at_random_ends_in_anything_but_one_line(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "scripts.robustness.fuzz", "--inputs", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()[-4:]]
    assert sum(counts) == 300
    assert all(counts)


def fail(_: object = None) -> int:
    raise ValueError("planted")


def allocate() -> int:
    """Fill pages that are not of the heap, which may have free ones after other tests."""
    pages = mmap.mmap(-1, 100 * 2**20)
    return pages.write(b"x" * len(pages)) * 0


def connect() -> int:
    socket.create_connection(("127.0.0.1", 9))
    return 0


def start() -> int:
    return subprocess.run(["true"], check=True).returncode


def write_outside() -> int:
    return Path("run.ckpt").write_text("x", "utf-8") * 0


def write_in_c() -> int:
    return ctypes.CDLL(None).creat(b"foreign", 0o600) * 0


def load_library() -> int:
    return ctypes.CDLL("./evil.so") is None


def show_escape_codes() -> int:
    return sys.stdout.write("\x1b[2J") * 0


PLANTED = {
    "hang": (lambda: time.sleep(60) or 0, "hang"),
    "crash": (lambda: os.kill(os.getpid(), signal.SIGSEGV) or 0, "signal"),
    "abort": (lambda: os.abort(), "signal"),
    "exception": (fail, "traceback"),
    "exception that is caught": (
        lambda: run_with_error_handling(fail, debug=False),
        "unhandled error",
    ),
    "another exit code": (lambda: 7, "exit code"),
    "no message": (lambda: 2, "message"),
    "escape codes": (show_escape_codes, "message"),
    "memory": (allocate, "memory"),
    "a file that is changed": (write_outside, "foreign file"),
    "a file written in C": (write_in_c, "foreign file"),
    "a folder": (lambda: Path("../more").mkdir() or 0, "foreign file"),
    "network": (connect, "network"),
    "a process": (start, "process"),
    "a library": (load_library, "library"),
}


def test_each_kind_of_failure_has_been_planted():
    assert {verdict for _, verdict in PLANTED.values()} == set(FAILURES)


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_reported(defect, tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "LIMIT_SECONDS", 1)
    monkeypatch.setattr(isolation, "LIMIT_MIB", 64)
    act, verdict = PLANTED[defect]
    (tmp_path / "work").mkdir()
    files = {"run.ckpt": b"before", "evil.so": b"no library"}
    item = Input(kind="checkpoint", words=(), files=files)
    assert run_isolated(item, tmp_path / "work", act).verdict == verdict


@pytest.mark.parametrize("verdict", ["accepted", "refused"])
def test_what_a_command_may_do_is_no_failure(verdict, tmp_path):
    def act() -> int:
        (Path("out") / "labels").mkdir()
        (Path("out") / "labels" / "x").write_text("x", "utf-8")
        if verdict == "refused":
            print("unet3d: a sentence", file=sys.stderr)
        return 2 if verdict == "refused" else 0

    assert run_isolated(Input(kind="volume", words=()), tmp_path, act).verdict == verdict


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "original"
    fuzz.create_valid_inputs(folder)
    return folder


@pytest.mark.filterwarnings("ignore:Duplicate name")  # archives with a name twice are drawn
def test_an_input_that_crashes_is_counted_and_the_others_go_on(original, tmp_path):
    def act(item: Input) -> int:
        if item.kind == "volume":
            os.kill(os.getpid(), signal.SIGSEGV)
        return 0

    kinds = ("checkpoint", "volume")
    results = fuzz.fuzz(original, 30, 0, kinds=kinds, act=act, keep=tmp_path)
    crashed, fine = results.verdicts["volume", "signal"], results.verdicts["checkpoint", "accepted"]
    assert (crashed + fine, len(results.failures)) == (30, crashed)
    assert crashed * fine
    assert len(list(tmp_path.iterdir())) == crashed


@pytest.mark.slow
def test_every_command_that_gets_drawn_volumes_accepts_valid_ones(original, tmp_path):
    """Or it would refuse all of them, whatever they hold."""
    commands: dict[tuple[str, ...], Input] = {}

    @given(st.data())
    @settings(max_examples=300, derandomize=True, deadline=None, database=None)
    def collect(data):
        item = data.draw(draw_volumes(original, fuzz.TRAIN))
        commands.setdefault(item.words, item)

    collect()
    commands[("load", "run.ckpt")] = Input(kind="checkpoint", words=("load", "run.ckpt"))
    assert {words[0] for words in commands} == {
        *("predict", "evaluate", "check", "plan", "train", "load")
    }
    for words in [*commands]:  # a network takes long; dicom writes what refers to its images
        if words[0] == "predict" and not {"input=samples/dicom", "input=samples/.nii"} & {*words}:
            del commands[words]
    for number, item in enumerate(commands.values()):
        folder = tmp_path / str(number)
        copytree(original, folder)
        if item.words[0] != "load":
            isolation.compose(item.words)  # in this process, as when fuzzing
        outcome = run_isolated(replace(item, files={}), folder)
        assert outcome.verdict == "accepted", (item.words, outcome)
