"""Stop runs and a prediction at random moments; they must end with what uninterrupted ones have.

    python -m scripts.chaos                       # into benchmarks/cpu-chaos.json, in five minutes
    python -m scripts.chaos --stops 40 --seed 7

A run with one process and a run with two are each stopped by SIGKILL and SIGTERM in turns, and
resumed with resume=auto. Every step writes a checkpoint. Then weights, optimizer and step are
compared bit for bit. A prediction that reads and writes a volume slab by slab is stopped by
SIGKILL, and its labels are compared.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from scripts.bench.results import ROOT, TRAIN, make_parser, write_results
from scripts.compare_checkpoints import is_identical

JOB = [
    *("data.layout.size=[16,16,16]", "data.layout.num_cases=8", "data.patch_size=[16,16,16]"),
    *("data.batch_size=2", "data.patches_per_case=1", "trainer.accelerator=cpu"),
    *("memory.estimate=false", "evaluation.enabled=false", "save_every_seconds=0", "resume=auto"),
]
TIMEOUT_SECONDS = 300
"""A run that takes longer to stop, or to end, hangs."""


def start(words: list[str], folder: Path, command: Sequence[str] = TRAIN) -> subprocess.Popen:
    """Start or resume a run."""
    with folder.with_suffix(".txt").open("a") as log:
        return subprocess.Popen(
            [*command, *words, f"hydra.run.dir={folder}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def wait_for_moment(run: subprocess.Popen, folder: Path, random: Random) -> None:
    """Wait for a random moment: one in four while the run starts, the others while it trains."""
    begin, checkpoint = time.time(), folder / "checkpoints" / "last.ckpt"
    starting = random.random() < 0.25
    while run.poll() is None and not starting:
        if checkpoint.exists() and checkpoint.stat().st_mtime > begin:
            break
        time.sleep(0.01)
    time.sleep(random.uniform(0, 5 if starting else 0.5))


def stop(run: subprocess.Popen, number: signal.Signals) -> int:
    """Stop a run; return its exit code as in a shell."""
    for pid in list_tree(run.pid) if number == signal.SIGKILL else [run.pid]:
        os.kill(pid, number)
    code = run.wait(TIMEOUT_SECONDS)
    return 128 - code if code < 0 else code


def list_tree(pid: int) -> list[int]:
    """Return a process and its descendants; the ranks of a run may be in other sessions."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in list_tree(int(child)))]


def interrupt(words: list[str], folder: Path, stops: int, random: Random) -> Counter[str]:
    """Stop a run and let it end; return how often it ended with which exit code."""
    codes: Counter[str] = Counter()
    for n in range(stops):
        number = (signal.SIGKILL, signal.SIGTERM)[n % 2]
        run = start(words, folder)
        wait_for_moment(run, folder, random)
        if run.poll() is None:
            codes[f"{stop(run, number)} after {number.name}"] += 1
    codes[f"{start(words, folder).wait(TIMEOUT_SECONDS)} at the end"] += 1
    return codes


def interrupt_prediction(run: Path, stops: int, random: Random) -> dict[str, Any]:
    """Stop a prediction by slabs and let it end; compare its labels with those of another."""
    scan, command = run.with_name("scan.npy"), [sys.executable, "-m", "unet3d", "predict"]
    np.save(scan, np.random.default_rng(0).normal(size=(192, 96, 96)).astype(np.float32))
    words, codes, labels = [f"checkpoint={run}", f"input={scan}", "memory_gib=0.085"], Counter(), []
    for name, count in (("whole", 0), ("parts", stops)):
        labels.append(run.with_name(f"{name}.npy"))
        given = [*words, f"output={labels[-1]}"], run.with_name(name), command
        for _ in range(count):
            process = start(*given)
            time.sleep(random.uniform(3, 8))
            if process.poll() is None:
                codes[f"{stop(process, signal.SIGKILL)} after SIGKILL"] += 1
        codes[f"{start(*given).wait(TIMEOUT_SECONDS)} at the end"] += 1
    same = np.array_equal(*map(np.load, labels))
    return {"prediction": True, "ends": dict(codes), "identical": same}


def main() -> int:
    parser = make_parser("scripts.chaos", __doc__, output="cpu-chaos.json")
    parser.add_argument("--stops", type=int, default=12, help="of each run")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, expected = [], {"137 after SIGKILL", "143 after SIGTERM", "0 at the end"}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for ranks in (1, 2):
            words = [*JOB, f"trainer.devices={ranks}", f"trainer.max_steps={options.steps}"]
            words += [f"data.root={scratch / 'data'}", f"data.cache={scratch / 'cache'}"]
            folders = [scratch / f"{kind}-{ranks}" for kind in ("uninterrupted", "stopped")]
            if start(words, folders[0]).wait(TIMEOUT_SECONDS):
                sys.exit(folders[0].with_suffix(".txt").read_text())
            codes = interrupt(words, folders[1], options.stops, Random(options.seed + ranks))
            same = is_identical(*(folder / "checkpoints" / "last.ckpt" for folder in folders))
            rows.append({"ranks": ranks, "ends": dict(codes), "identical": same})
            print(rows[-1], flush=True)
            if not same or codes.keys() - expected:
                print(folders[1].with_suffix(".txt").read_text()[-4000:])
        rows.append(interrupt_prediction(folders[0], options.stops // 2, Random(options.seed)))
        print(rows[-1], flush=True)
    write_results(options.output, {"command": "python -m scripts.chaos", "rows": rows})
    return int(not all(row["identical"] and row["ends"].keys() <= expected for row in rows))


if __name__ == "__main__":
    sys.exit(main())
