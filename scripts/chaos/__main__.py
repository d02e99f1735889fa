"""Interrupt training runs at random moments; they must end as if they had never been interrupted.

    python -m scripts.chaos                      # all parts, into benchmarks/cpu-chaos.json
    python -m scripts.chaos kill term --kills 10 # some parts; only their rows are written
    python -m scripts.chaos --quick              # a short form for the tests; writes nothing

The parts:
    kill      SIGKILL
    term      SIGTERM, with one rank and with two
    ranks     one of two ranks is killed or stopped, or the process that started them is killed
    scaling   two ranks against one
    overhead  what fault tolerance costs per step

Each run is resumed with resume=auto and interrupted again. Then its checkpoints and curves are
compared with those of an uninterrupted run.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from scripts.chaos.costs import measure_overhead, measure_scaling
from scripts.chaos.runs import (
    SMALL_JOB,
    STOP_TIMEOUT_SECONDS,
    TRAINING_TIMEOUT_SECONDS,
    Job,
    find_corrupt,
    find_differences,
    finish,
    get_progress,
    instrument,
    is_running,
    read_results,
    read_saved_steps,
)
from unet3d.cli.launch import GRACE_SECONDS
from unet3d.lit.distributed import HEARTBEAT_SECONDS
from unet3d.report.run_report import collect_versions, write_report

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
INTERRUPTIONS_PER_RUN = 5
TIMEOUT_SECONDS = 5
"""trainer.timeout_seconds where a rank stops responding."""

EXIT_SECONDS = 10


@dataclass
class Row:
    """One check: its name, what was found, the goal, and whether it was reached."""

    check: str
    found: str
    goal: str
    good: bool
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tally:
    """Counts over many interruptions."""

    phases: Counter[str] = field(default_factory=Counter)  # of the interruptions
    codes: Counter[str] = field(default_factory=Counter)
    bad_exits: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    runs: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for the result file."""
        return {
            "hits": self.phases.total(),
            "in": dict(self.phases),
            "runs": self.runs,
            "exit_codes": dict(self.codes),
            "faults": self.bad_exits + self.corrupt + self.differences + self.failed,
        }

    def format_phases(self) -> str:
        return ", ".join(f"{n} in {phase}" for phase, n in self.phases.most_common())

    def format_resumed(self) -> str:
        count = len(self.differences)
        return f"{len(self.failed)} of {self.runs} runs failed, {count} parts differ"


Interrupt = Callable[[Job, Tally, int], bool]
"""Interrupts a job; returns False if the job ended before. The int counts the interruptions."""


@dataclass
class Experiment:
    """The folder of all runs, and the settings that they share."""

    folder: Path
    kills: int
    seed: int
    words: list[str]

    def train_reference(self, name: str, words: Sequence[str]) -> dict[str, Any]:
        """Train a run without interruption; return its results."""
        folder = self.folder / name
        if not finish([*self.words, *words], folder):
            sys.exit(f"the uninterrupted run failed: {folder.with_suffix('.txt').read_text()}")
        return read_results(folder)

    def interrupt_runs(
        self,
        name: str,
        words: Sequence[str],
        interrupt: Interrupt,
        *,
        count: int,
        separate: bool = False,
    ) -> Tally:
        """Interrupt runs `count` times; finish each run and compare it with the reference."""
        words = [*self.words, *words]
        tally, number = Tally(), 0
        reference = self.train_reference(f"{name}-reference", words)
        while number < count:
            folder = self.folder / f"{name}-{tally.runs}"
            for _ in range(INTERRUPTIONS_PER_RUN):
                job = Job(words, folder, separate=separate)
                if number < count and interrupt(job, tally, number):
                    number += 1
                    continue
                code, _ = job.wait(TRAINING_TIMEOUT_SECONDS)
                if code != 0:
                    tally.failed.append(f"{folder.name} ended with {code}: {read_tail(job, 1)}")
                break
            if not finish(words, folder):
                tally.failed.append(f"{folder.name}: {read_tail(job, 1)}")
            else:
                parts = find_differences(folder, reference)
                tally.differences += [f"{folder.name}: {part}" for part in parts]
            tally.runs += 1
            shutil.rmtree(folder, ignore_errors=True)
        return tally


def read_tail(job: Job, count: int = 2) -> str:
    """Return the last lines of a job's log."""
    lines = job.log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-count:])[:300]


def kill(experiment: Experiment) -> list[Row]:
    """SIGKILL, while every step writes a checkpoint."""
    random = Random(experiment.seed)

    def interrupt(job: Job, tally: Tally, number: int) -> bool:
        if not job.wait_random(random, start=1.5, spread=1.0):
            return False
        phase, _ = get_progress()
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        tally.phases[phase] += 1
        tally.corrupt += find_corrupt(job.folder / "checkpoints")
        return True

    words = [f"trainer.max_steps={STEPS}", "save_every_seconds=0"]
    tally = experiment.interrupt_runs("kill", words, interrupt, count=experiment.kills)
    kills = f"SIGKILL, {tally.phases.total()} times ({tally.format_phases()})"
    return [
        Row(f"{kills}: cannot resume", f"{len(tally.failed)} of {tally.runs} runs", "0",
            not tally.failed, tally.to_dict()),
        Row("... corrupt checkpoints", f"{len(tally.corrupt)}", "0", not tally.corrupt),
        Row("... parts that differ from an uninterrupted run", f"{len(tally.differences)} parts",
            "0", not tally.differences),
    ]  # fmt: skip


def term(experiment: Experiment) -> Iterator[Row]:
    """SIGTERM, to the process that was started or to one rank of two."""
    few = max(1, experiment.kills // 5)
    yield from terminate(experiment, "1 rank", ranks=1, count=experiment.kills)
    yield from terminate(experiment, "2 ranks", ranks=2, count=experiment.kills)
    yield from terminate(
        experiment, "2 ranks, started by separate commands", ranks=2, count=few, separate=True
    )


def terminate(
    experiment: Experiment, name: str, *, ranks: int, count: int, separate: bool = False
) -> list[Row]:
    random = Random(experiment.seed + ranks)

    def interrupt(job: Job, tally: Tally, number: int) -> bool:
        if not job.wait_random(random, start=2.0 + 7 * separate, spread=1.0 + 3 * separate):
            return False
        pid = job.process.pid
        if ranks > 1 and number % 2 and len(job.list_ranks()) == ranks:
            pid = job.list_ranks()[number // 2 % ranks]
        phase, _ = get_progress()
        os.kill(pid, signal.SIGTERM)
        code, seconds = job.wait()
        tally.phases["any phase" if separate else phase] += 1
        tally.codes[str(code)] += 1
        tally.seconds.append(seconds)
        if code not in (0, 143):
            target = "the job" if pid == job.process.pid else f"rank {number // 2 % ranks}"
            tally.bad_exits.append(f"exit {code}, {target} in {phase}: {read_tail(job)}")
        if not separate and get_progress()[1]:
            tally.steps_lost.append(get_progress()[1] - read_saved_steps(job.folder))
        return True

    words = [f"trainer.max_steps={STEPS}", f"trainer.devices={ranks}"]
    run = f"term-{ranks}{'-separate' * separate}"
    tally = experiment.interrupt_runs(run, words, interrupt, count=count, separate=separate)
    hangs = tally.codes["None"]
    others = sum(n for code, n in tally.codes.items() if code not in ("0", "143", "None"))
    longest, lost = max(tally.seconds), max(tally.steps_lost, default=0)
    detail = tally.to_dict() | {
        "median_seconds_to_leave": round(median(tally.seconds), 2),
        "longest_seconds_to_leave": round(longest, 2),
        "most_steps_lost": lost,
    }
    times = f"{tally.phases.total()} times ({tally.format_phases()})"
    rows = [
        Row(f"SIGTERM, {name}, {times}: hangs", str(hangs), "0", not hangs, detail),
        Row("... exit codes other than 143", str(others), "0", not others),
        Row("... seconds to exit, median and maximum",
            f"{median(tally.seconds):.1f}, {longest:.1f}",
            f"<= {EXIT_SECONDS}", longest <= EXIT_SECONDS),
        Row("... cannot resume, or differ from an uninterrupted run", tally.format_resumed(), "0",
            not tally.failed and not tally.differences),
    ]  # fmt: skip
    if not separate:
        rows.insert(3, Row("... steps lost, at most", str(lost), "<= 1", lost <= 1))
    return rows


def ranks(experiment: Experiment) -> Iterator[Row]:
    """Kill or stop one of two ranks: the other must name it. Kill their parent process."""
    few = max(2, experiment.kills // 5)
    for separate, count in ((False, few), (True, 2)):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            yield lose_rank(experiment, number, count=count, separate=separate)
    yield lose_parent(experiment, count=few)


def lose_rank(experiment: Experiment, number: signal.Signals, *, count: int, separate: bool) -> Row:
    """Send a signal to one of two ranks."""
    random = Random(experiment.seed)
    limit = TIMEOUT_SECONDS + 3 * HEARTBEAT_SECONDS + GRACE_SECONDS + 2

    def interrupt(job: Job, tally: Tally, nth: int) -> bool:
        start = time.time()
        path = job.folder / "checkpoints" / "last.ckpt"
        while separate and not (path.exists() and path.stat().st_mtime > start):
            if not job.wait_until(time.monotonic() + 0.01):
                return False
        if not separate and not job.wait_for_phase(("training", "validation", "checkpoint")):
            return False
        moment = time.monotonic() + random.uniform(0, 1)
        if not job.wait_until(moment) or len(job.list_ranks()) < 2:
            return False
        phase, _ = get_progress()
        os.kill(job.list_ranks()[nth % 2], number)
        code, seconds = job.wait()
        tally.phases["any phase" if separate else phase] += 1
        tally.codes[str(code)] += 1
        tally.seconds.append(seconds)
        log = job.log.read_text(errors="replace")
        if code == 0:
            tally.phases["end"] += 1  # the run had finished
        elif code != 4 or f"rank {nth % 2} " not in log:
            error = f"exit {code}, rank {nth % 2} in {phase}: {read_tail(job)}"
            tally.bad_exits.append(error)
        return True

    words = [f"trainer.max_steps={STEPS}", "trainer.devices=2", "save_every_seconds=0"]
    words += [f"trainer.timeout_seconds={TIMEOUT_SECONDS}"]
    run = f"{number.name.lower()}{'-separate' * separate}"
    tally = experiment.interrupt_runs(run, words, interrupt, count=count, separate=separate)
    longest = max(tally.seconds)
    started = ", started by separate commands" if separate else ""
    return Row(
        f"one of two ranks receives {number.name}, {tally.phases.total()} times{started}",
        f"{len(tally.bad_exits)} without exit code 4 and the name of the rank, "
        f"{longest:.1f} s at most, {tally.format_resumed()}",
        f"0, <= {limit:.0f} s, 0, 0",
        not (tally.bad_exits or tally.failed or tally.differences) and longest <= limit,
        tally.to_dict() | {"longest_seconds": round(longest, 1)},
    )


def lose_parent(experiment: Experiment, *, count: int) -> Row:
    """Kill the process that started two ranks: they must not keep training."""
    random = Random(experiment.seed)

    def interrupt(job: Job, tally: Tally, number: int) -> bool:
        if not job.wait_for_phase(("training", "validation", "checkpoint")):
            return False
        moment = time.monotonic() + random.uniform(0, 1)
        if not job.wait_until(moment) or len(job.list_ranks()) < 2:
            return False
        start, pids = time.monotonic(), job.list_ranks()
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        while any(map(is_running, pids)) and time.monotonic() < start + STOP_TIMEOUT_SECONDS:
            time.sleep(0.01)
        tally.phases["any phase"] += 1
        tally.seconds.append(time.monotonic() - start)
        for pid in filter(is_running, pids):
            tally.bad_exits.append(f"{pid} keeps training")
            os.kill(pid, signal.SIGKILL)
        return True

    words = [f"trainer.max_steps={STEPS}", "trainer.devices=2"]
    tally = experiment.interrupt_runs("orphans", words, interrupt, count=count)
    longest = max(tally.seconds)
    good = not (tally.bad_exits or tally.failed or tally.differences)
    return Row(
        f"the parent process of two ranks receives SIGKILL, {tally.phases.total()} times",
        f"{len(tally.bad_exits)} keep training, {longest:.1f} s to exit at most, "
        f"{tally.format_resumed()}",
        f"0, <= {EXIT_SECONDS} s, 0, 0",
        good and longest <= EXIT_SECONDS,
        tally.to_dict() | {"longest_seconds": round(longest, 1)},
    )


def scaling(experiment: Experiment) -> list[Row]:
    """Compare two ranks with one."""
    result = measure_scaling(experiment.folder)
    share = result["efficiency"]
    return [
        Row("2 ranks on 2 cores against 1 on 1 (weak): t1 / t2", f"{100 * share:.0f}%", ">= 85%",
            share >= 0.85, result),
    ]  # fmt: skip


def overhead(experiment: Experiment) -> list[Row]:
    """Measure what fault tolerance takes of a step of the default run."""
    result = measure_overhead(experiment.folder)
    share = result["share"]
    return [
        Row("overhead per step of the default run", f"{100 * share:.2f}%", "<= 1%",
            share <= 0.01, result),
    ]  # fmt: skip


PARTS: dict[str, Callable[[Experiment], Iterable[Row]]] = {
    "kill": kill,
    "term": term,
    "ranks": ranks,
    "scaling": scaling,
    "overhead": overhead,
}


def run_quick(experiment: Experiment) -> Iterator[Row]:
    """Two SIGKILLs, and a SIGTERM with one rank and with two."""
    yield from kill(experiment)
    yield from terminate(experiment, "1 rank", ranks=1, count=1)
    yield from terminate(experiment, "2 ranks", ranks=2, count=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--kills", type=int, default=50, help="number of each signal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="run a short form")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-chaos.json")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    torch.set_num_threads(1)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # resumed runs cause warnings
    os.environ["OMP_NUM_THREADS"] = "1"
    instrument()
    scratch = Path(tempfile.mkdtemp())  # a context manager would remove it in forked children too
    kills = 2 if options.quick else options.kills
    experiment = Experiment(scratch, kills, options.seed, list(SMALL_JOB))
    experiment.words += [f"data.root={scratch / 'synthetic'}"]
    experiment.words += [f"data.cache={scratch / 'preprocessed'}"]
    good = True
    try:
        for part in ["quick"] if options.quick else options.parts or PARTS:
            rows = []
            for row in run_quick(experiment) if options.quick else PARTS[part](experiment):
                print(f"{'ok ' if row.good else 'BAD'} {row.check}: {row.found} ({row.goal})")
                for fault in row.detail.get("faults", []):
                    print(f"      {fault}")
                sys.stdout.flush()
                rows.append(row)
            good = good and all(row.good for row in rows)
            if not options.quick:
                write_rows(part, rows, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return int(not good)


def write_rows(part: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Replace a part's rows in the result file."""
    path: Path = options.output
    report = json.loads(path.read_text()) if path.exists() else {}
    command = "python -m scripts.chaos"
    report |= {"command": command, "versions": collect_versions()}
    report.setdefault("parts", {})[part] = {
        "command": f"{command} {part} --kills {options.kills} --seed {options.seed}",
        "rows": [
            {"check": r.check, "found": r.found, "goal": r.goal, "good": r.good, **r.detail}
            for r in rows
        ],
    }
    write_report(report, path)


if __name__ == "__main__":
    sys.exit(main())
