"""Run commands on corrupted inputs: none may end in a traceback, a hang or a wrong result.

    python -m scripts.robustness.corrupted_inputs             # all, into benchmarks/
    python -m scripts.robustness.corrupted_inputs --count 20  # some of each kind; writes nothing
    python -m scripts.robustness.corrupted_inputs --match 'dim=' --show

Verdicts: `refused` is one line and an exit code. `harmless` means that the command read the
original content in spite of the defect. `unexpected` is a line and an exit code too, but with the
message of an exception that the code does not handle. All other verdicts are failures.
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

import unet3d.cli.check
import unet3d.cli.evaluate
import unet3d.cli.predict
import unet3d.cli.train  # noqa: F401  (imported once, before all forks)
from scripts.compare_checkpoints import is_equal
from scripts.robustness.generate_inputs import Input, generate_inputs
from unet3d.cli.main import main as run_command
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.data.layouts.synthetic import write_dataset
from unet3d.data.nifti.reader import read_volume
from unet3d.report.run_report import collect_versions, write_report

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "cpu-corrupted-inputs.json"
SEED = 0
LIMIT_SECONDS = 60
LIMIT_GIB = 4  # memory that a command may take

DATASET = ["data=decathlon", "data.root=set", "data.cache=preprocessed"]
TINY_RUN = [
    *("data.patch_size=[8,8,8]", "data.batch_size=1", "model.width=2", "model.depth=2"),
    *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "memory.estimate=false"),
    *("evaluation.enabled=false", "trainer.max_steps=1", "hydra.run.dir=run", "fold=none"),
]
COMMANDS = {
    "check": ["check", *DATASET],
    "train": ["train", *DATASET, *TINY_RUN],
    "predict": ["predict", "checkpoint=run.ckpt", "input=scans", "output=out", "device=cpu"],
    "evaluate": ["evaluate", "predictions=predictions", "references=set/labelsTr", "output=scores"],
}
GOOD = ("refused", "harmless", "unexpected")


@dataclass(frozen=True)
class Outcome:
    """What a command did with an input."""

    code: int  # negative: the signal that ended it
    seconds: float
    mib: float
    stderr: str
    ran_code: bool  # code in the input was executed
    accepted: bool  # exit code 0, although the content is not the original one

    @property
    def verdict(self) -> str:
        """The first failure; `refused`, `harmless` or `unexpected` if there is none."""
        if self.code == -signal.SIGKILL:
            return "hang"
        failures = {
            "executed code": self.ran_code,
            "traceback": "Traceback (most recent call last)" in self.stderr,
            "crash": self.code not in (0, 1, 2, 3, 4),
            "too much memory": self.mib > LIMIT_GIB * 1024,
            "silent wrong result": self.accepted,
        }
        for name, failed in failures.items():
            if failed:
                return name
        if "debug=true" in self.stderr:
            return "unexpected"
        return "refused" if self.code else "harmless"


def fork(
    function: Callable[[], int], folder: Path, timeout: float
) -> tuple[int, float, float, str]:
    """Run a function in a child, in a folder.

    Return its exit code (negative for a signal), seconds, peak MiB and stderr.
    """
    start = time.perf_counter()
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
            limit = 3 * LIMIT_GIB * 2**30
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            code = function()
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
    while time.perf_counter() - start < timeout:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    stderr = (folder / ".stderr").read_text(errors="replace")
    return code, time.perf_counter() - start, usage.ru_maxrss / 1024, stderr


def create_valid_inputs(folder: Path) -> None:
    """Write a dataset, a checkpoint, scans and predictions without defects."""

    def train() -> int:
        Path("set").mkdir()
        write_dataset(
            Path("set"), classes=3, cases=5, size=[20, 18, 16], spacing_mm=[1, 1, 2], noise=0.1,
            seed=1,
        )  # fmt: skip
        return run_command(COMMANDS["train"])

    code, _, _, stderr = fork(train, folder, 300)
    if code:
        sys.exit(f"could not create the valid inputs: {stderr}")
    shutil.copy(folder / "run" / "checkpoints" / "last.ckpt", folder / "run.ckpt")
    shutil.rmtree(folder / "run")
    shutil.copytree(folder / "set" / "labelsTr", folder / "predictions")
    (folder / "scans").mkdir()
    shutil.copy(folder / "set" / "imagesTr" / "case_000.nii.gz", folder / "scans" / "a.nii.gz")


@cache
def read_volumes(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {str(f.relative_to(folder)): read_volume(f) for f in sorted(folder.rglob("*.nii.gz"))}


def reads_as_original(folder: Path, original: Path) -> bool:
    """Whether everything that commands read is equal to the original content."""
    try:
        volumes = read_volumes(original)
        if any(not (folder / name).is_file() for name in volumes):
            return False
        for name, (expected, expected_affine) in volumes.items():
            array, affine = read_volume(folder / name)
            same_affine = np.allclose(affine, expected_affine, atol=1e-3)
            if not np.array_equal(array, expected) or not same_affine:
                return False
        sets = [Decathlon(str(root / "set")) for root in (folder, original)]
        if sets[0].describe() != sets[1].describe():
            return False
        if len(sets[0].list_cases()) != len(sets[1].list_cases()):
            return False
        paths = (folder / "run.ckpt", original / "run.ckpt")
        return is_equal(*(torch.load(path, weights_only=True) for path in paths))
    except Exception:
        return False


def run_on_corrupted(item: Input, original: Path, folder: Path) -> Outcome:
    """Corrupt a copy of the valid inputs and run the command on it."""
    shutil.copytree(original, folder, symlinks=True)
    item.corrupt(folder, Random(f"{SEED} {item.name}"))
    words = [word for word in COMMANDS[item.command] if get_last_key(word) not in item.keys]
    words += item.overrides
    code, seconds, mib, stderr = fork(lambda: run_command(words), folder, LIMIT_SECONDS)
    harmless = code == 0 and item.may_be_harmless and reads_as_original(folder, original)
    ran_code = (folder / "OWNED").exists()
    shutil.rmtree(folder)
    return Outcome(code, seconds, mib, stderr, ran_code, accepted=code == 0 and not harmless)


def get_last_key(word: str) -> str:
    """Return the last key of an override.

    >>> get_last_key("data.patch_size=[8,8,8]")
    'patch_size'
    """
    return word.partition("=")[0].rpartition(".")[2]


def sample(items: Sequence[Input], count: int) -> list[Input]:
    """Draw `count` inputs; each kind has the same share as among all inputs."""
    kinds: dict[str, list[Input]] = {}
    for item in items:
        kinds.setdefault(item.kind, []).append(item)
    drawn = []
    for kind in kinds.values():
        share = max(1, round(count * len(kind) / len(items)))
        drawn += Random(SEED).sample(kind, min(share, len(kind)))
    return drawn[:count]


def get_title(item: Input) -> str:
    return f"{item.kind}: {item.name} ({item.command})"


def format_table(results: Sequence[tuple[Input, Outcome]]) -> str:
    """Count verdicts, one line per kind of input."""
    rows: list[tuple[str, ...]] = [("kind", "inputs", *GOOD, "bad")]
    kinds = [*dict.fromkeys(item.kind for item, _ in results), "all"]
    for kind in kinds:
        verdicts = [o.verdict for item, o in results if kind in (item.kind, "all")]
        counts = Counter(verdicts)
        bad = ", ".join(f"{n} {v}" for v, n in counts.items() if v not in GOOD) or "0"
        rows.append((kind, *map(str, (len(verdicts), *(counts[v] for v in GOOD))), bad))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows
    )


def build_report(results: Sequence[tuple[Input, Outcome]]) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        "command": "python -m scripts.robustness.corrupted_inputs",
        "seed": SEED,
        "limit_seconds": LIMIT_SECONDS,
        "versions": collect_versions(),
        "inputs": len(results),
        "verdicts": dict(Counter(outcome.verdict for _, outcome in results)),
        "longest_seconds": round(max(outcome.seconds for _, outcome in results), 1),
        "cases": [
            {
                "kind": item.kind,
                "name": item.name,
                "verb": item.command,
                "exit": outcome.code,
                "verdict": outcome.verdict,
            }
            for item, outcome in results
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.robustness.corrupted_inputs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, help="draw this many inputs, some of each kind")
    parser.add_argument("--match", default="", help="regular expression for `kind: name (command)`")
    parser.add_argument("--exclude", default="^$", help="regular expression for inputs to skip")
    parser.add_argument("--show", action="store_true", help="print the last line of each command")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    items = list(generate_inputs(SEED))
    total = len(items)
    items = [item for item in items if not re.search(options.exclude, get_title(item))]
    items = [item for item in items if re.search(options.match, get_title(item))]
    if not items:
        parser.error("no input matches --match and --exclude")
    items = sample(items, options.count) if options.count else items
    results: list[tuple[Input, Outcome]] = []
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "original"
        original.mkdir()
        create_valid_inputs(original)
        for item in items:
            outcome = run_on_corrupted(item, original, Path(scratch) / "corrupted")
            results.append((item, outcome))
            if options.show or outcome.verdict not in ("refused", "harmless"):
                last = outcome.stderr.strip().splitlines()[-1:] or [""]
                print(f"{outcome.verdict} ({outcome.code}): {get_title(item)}: {last[0][:200]}")
    print(format_table(results))
    if len(items) == total:
        write_report(build_report(results), options.output)
    return int(any(outcome.verdict not in GOOD for _, outcome in results))


if __name__ == "__main__":
    sys.exit(main())
