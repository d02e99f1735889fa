"""Corrupted inputs, each met by a command: none may end in a traceback, a hang or a wrong result.

python scripts/hostile.py            # all of them, into benchmarks/cpu-hostile.json
python scripts/hostile.py --only 20  # some of each kind, nothing is written
python scripts/hostile.py --match 'dim=' --show

A header that reads as the good one does is harmless; `unforeseen` is one line and an exit code,
but in the words of an exception.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from hostile_inputs import Input, inputs

import unet3d.cli.check
import unet3d.cli.evaluate
import unet3d.cli.predict
import unet3d.cli.train  # noqa: F401  (imported once, before all forks)
from unet3d.cli.main import main as command
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.data.layouts.synthetic import write_dataset
from unet3d.data.nifti.reader import read_volume
from unet3d.report import run_report

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
LIMIT_SECONDS = 60
LIMIT_GIB = 4  # of a child's memory: an input that takes more is a bomb

SET = ["data=decathlon", "data.root=set", "data.cache=prepared"]
TINY = [
    *("data.patch_size=[8,8,8]", "data.batch_size=1", "model.width=2", "model.depth=2"),
    *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "memory.estimate=false"),
    *("evaluation.enabled=false", "trainer.max_steps=1", "hydra.run.dir=run", "fold=none"),
]
VERBS = {
    "check": ["check", *SET],
    "train": ["train", *SET, *TINY],
    "predict": ["predict", "checkpoint=run.ckpt", "input=scans", "output=out", "device=cpu"],
    "evaluate": ["evaluate", "predictions=predictions", "references=set/labelsTr", "output=scores"],
}


@dataclass(frozen=True)
class Outcome:
    """How a command met an input."""

    code: int  # negative: the signal that ended it
    seconds: float
    mib: float
    stderr: str
    owned: bool  # the input's code has run
    taken: bool  # exit 0 on a content that is not good

    @property
    def verdict(self) -> str:
        """The first thing that is wrong with it; `refused` or `harmless` if nothing is."""
        if self.code == -signal.SIGKILL:
            return "hang"
        for name, true in (
            ("code ran", self.owned),
            ("traceback", "Traceback (most recent call last)" in self.stderr),
            ("crash", self.code < 0 or self.code not in (0, 1, 2, 3, 4)),
            ("bomb", self.mib > LIMIT_GIB * 1024),
            ("silent wrong result", self.taken),
        ):
            if true:
                return name
        if "debug=true shows where" in self.stderr:
            return "unforeseen"
        return "refused" if self.code else "harmless"


GOOD = ("refused", "harmless", "unforeseen")


def forked(work: Callable[[], int], folder: Path, seconds: float) -> tuple[int, float, float, str]:
    """Run in a child in a folder: exit code (a signal's is negative), seconds, MiB, stderr."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's idle threads do not matter
        child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(folder)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            most = 3 * LIMIT_GIB * 2**30
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            code = work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    while time.perf_counter() - began < seconds:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    said = (folder / ".stderr").read_text(errors="replace")
    return code, time.perf_counter() - began, usage.ru_maxrss / 1024, said


def good(folder: Path) -> None:
    """A data set, a checkpoint, scans and predictions that nothing is wrong with."""

    def made() -> int:
        Path("set").mkdir()
        write_dataset(
            Path("set"), classes=3, cases=5, size=[20, 18, 16], spacing_mm=[1, 1, 2], noise=0.1,
            seed=1,
        )  # fmt: skip
        return command(VERBS["train"])

    code, _, _, said = forked(made, folder, 300)
    if code:
        sys.exit(f"the good inputs could not be made: {said}")
    shutil.copy(folder / "run" / "checkpoints" / "last.ckpt", folder / "run.ckpt")
    shutil.rmtree(folder / "run")
    shutil.copytree(folder / "set" / "labelsTr", folder / "predictions")
    (folder / "scans").mkdir()
    shutil.copy(folder / "set" / "imagesTr" / "case_000.nii.gz", folder / "scans" / "a.nii.gz")


@cache
def volumes(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {str(f.relative_to(folder)): read_volume(f) for f in sorted(folder.rglob("*.nii.gz"))}


def same(folder: Path, pristine: Path) -> bool:
    """Whether what the commands read is what the good files hold."""
    try:
        wanted = volumes(pristine)
        if any(not (folder / name).is_file() for name in wanted):
            return False
        for name, (array, affine) in wanted.items():
            found, placed = read_volume(folder / name)
            if not np.array_equal(found, array) or not np.allclose(placed, affine, atol=1e-3):
                return False
        sets = [Decathlon(str(root / "set")) for root in (folder, pristine)]
        if sets[0].describe() != sets[1].describe():
            return False
        if len(sets[0].cases()) != len(sets[1].cases()):
            return False
        first, second = (torch.load(r / "run.ckpt", weights_only=True) for r in (folder, pristine))
        return equal(first, second)
    except Exception:
        return False


def equal(one: Any, other: Any) -> bool:
    """Values and tensors alike."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    return bool(one == other)


def met(given: Input, pristine: Path, work: Path) -> Outcome:
    """Spoil a copy and run the command on it."""
    shutil.copytree(pristine, work, symlinks=True)
    given.spoil(work, Random(f"{SEED} {given.name}"))
    usual = [w for w in VERBS[given.verb] if last_key(w) not in given.instead_of]
    words = [*usual, *given.words]
    code, seconds, mib, said = forked(lambda: command(words), work, LIMIT_SECONDS)
    taken = code == 0 and not (given.harmless and same(work, pristine))
    owned = (work / "OWNED").exists()
    shutil.rmtree(work)
    return Outcome(code, seconds, mib, said, owned, taken)


def last_key(word: str) -> str:
    return word.partition("=")[0].rpartition(".")[2]


def chosen(everything: Sequence[Input], count: int) -> list[Input]:
    """`count` of them, of each kind as large a share as of all."""
    kinds: dict[str, list[Input]] = {}
    for given in everything:
        kinds.setdefault(given.kind, []).append(given)
    found = []
    for kind in kinds.values():
        share = max(1, round(count * len(kind) / len(everything)))
        found += Random(SEED).sample(kind, min(share, len(kind)))
    return found[:count] if len(found) > count else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, help="so many, some of each kind")
    parser.add_argument("--match", default="", help="a pattern of `kind: name (verb)`")
    parser.add_argument("--without", default="^$", help="a pattern of what is left out")
    parser.add_argument("--show", action="store_true", help="what every command said")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-hostile.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    everything = [i for i in inputs(SEED) if not re.search(options.without, title(i))]
    some = [i for i in everything if re.search(options.match, title(i))]
    some = chosen(some, options.only) if options.only else some
    results: list[tuple[Input, Outcome]] = []
    with tempfile.TemporaryDirectory() as scratch:
        pristine = Path(scratch) / "good"
        pristine.mkdir()
        good(pristine)
        for given in some:
            outcome = met(given, pristine, Path(scratch) / "spoiled")
            results.append((given, outcome))
            bad = outcome.verdict not in ("refused", "harmless")
            if options.show or bad:
                last = outcome.stderr.strip().splitlines()[-1:] or [""]
                print(f"{outcome.verdict} ({outcome.code}): {title(given)}: {last[0][:200]}")
    print(table(results))
    if len(some) == len(list(inputs(SEED))):
        run_report.write_report(record(results), options.output)
    return int(any(outcome.verdict not in GOOD for _, outcome in results))


def title(given: Input) -> str:
    return f"{given.kind}: {given.name} ({given.verb})"


def table(results: Sequence[tuple[Input, Outcome]]) -> str:
    """One line per kind."""
    rows: list[tuple[str, ...]] = [("kind", "inputs", "refused", "harmless", "unforeseen", "bad")]
    kinds = [*dict.fromkeys(given.kind for given, _ in results), "all"]
    for kind in kinds:
        verdicts = [o.verdict for given, o in results if kind in (given.kind, "all")]
        counts = Counter(verdicts)
        bad = {v: n for v, n in counts.items() if v not in GOOD}
        said = ", ".join(f"{n} {v}" for v, n in bad.items()) or "0"
        rows.append((kind, *map(str, (len(verdicts), *(counts[v] for v in GOOD))), said))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows
    )


def record(results: Sequence[tuple[Input, Outcome]]) -> dict[str, Any]:
    """For benchmarks/."""
    return {
        "command": "python scripts/hostile.py",
        "seed": SEED,
        "limit_seconds": LIMIT_SECONDS,
        "versions": run_report.collect_versions(),
        "inputs": len(results),
        "verdicts": dict(Counter(outcome.verdict for _, outcome in results)),
        "longest_seconds": round(max(outcome.seconds for _, outcome in results), 1),
        "cases": [
            {
                "kind": given.kind,
                "name": given.name,
                "verb": given.verb,
                "exit": outcome.code,
                "verdict": outcome.verdict,
            }
            for given, outcome in results
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
