"""Runs that are killed, stopped and starved at random moments: do they go on as if never hit?

python scripts/chaos.py                      # all parts, into benchmarks/cpu-chaos.json
python scripts/chaos.py kill term --kills 10 # some parts, whose rows alone are written
python scripts/chaos.py --quick              # a short form for the checks; nothing is written

kill: SIGKILL. term: SIGTERM, with one rank and with two. ranks: one rank of two is killed, or
stopped without a word. scaling: two ranks beside one. overhead: what the callbacks that make this
possible cost a step. A run that has been hit is taken up with resume=auto, and hit again; when it
is done, its checkpoints and curves are compared with those of a run that was left alone.
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
from chaos_costs import overhead, scaling
from chaos_runs import (
    PATIENCE_SECONDS,
    SMALL,
    TRAINING_SECONDS,
    Job,
    corrupt,
    finish,
    gone,
    instrument,
    left,
    runs,
    shown,
    steps_in,
    unlike,
)

from unet3d.cli.launch import GRACE_SECONDS
from unet3d.lit.distributed import PULSE_SECONDS
from unet3d.report import run_report

ROOT = Path(__file__).resolve().parents[1]
STEPS = 60
HITS_A_RUN = 5
TIMEOUT_SECONDS = 5
"""trainer.timeout_seconds where a rank falls silent."""

LEAVE_SECONDS = 10


@dataclass
class Row:
    """One claim: what was asked, what was found."""

    check: str
    found: str
    goal: str
    good: bool
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tally:
    """Of many hits."""

    hits: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    runs: int = 0

    def record(self) -> dict[str, Any]:
        """For the file."""
        return {
            "hits": self.hits.total(),
            "in": dict(self.hits),
            "runs": self.runs,
            "exit_codes": dict(self.codes),
            "faults": self.bad + self.corrupt + self.unlike + self.dead,
        }


@dataclass
class Place:
    """Where runs are made, and what they have in common."""

    folder: Path
    kills: int
    seed: int
    words: list[str]

    def reference(self, name: str, words: Sequence[str]) -> dict[str, Any]:
        """What a run that nobody disturbs leaves."""
        folder = self.folder / name
        if not finish([*self.words, *words], folder):
            sys.exit(
                f"a run that nobody disturbed failed: {folder.with_suffix('.txt').read_text()}"
            )
        return left(folder)

    def tally(
        self,
        name: str,
        words: Sequence[str],
        hit: Callable[[Job, Tally, int], bool],
        *,
        hits: int,
        real: bool = False,
    ) -> Tally:
        """Hit runs until there were so many hits; finish each and compare it."""
        words = [*self.words, *words]
        tally, number = Tally(), 0
        reference = self.reference(f"{name}-alone", words)
        while number < hits:
            folder = self.folder / f"{name}-{tally.runs}"
            for _ in range(HITS_A_RUN):
                job = Job(words, folder, real=real)
                if number < hits and hit(job, tally, number):
                    number += 1
                    continue
                code, _ = job.ended(TRAINING_SECONDS)
                if code != 0:
                    tally.dead.append(f"{folder.name} ended with {code}: {last(job)}")
                break
            if not finish(words, folder):
                tally.dead.append(f"{folder.name}: {last(job)}")
            else:
                tally.unlike += [f"{folder.name}: {part}" for part in unlike(folder, reference)]
            tally.runs += 1
            gone(folder)
        return tally


def last(job: Job) -> str:
    """The last line that it said."""
    return ([*job.said.read_text(errors="replace").strip().splitlines(), ""][-1:] or [""])[0]


def said_of(job: Job) -> str:
    return " | ".join(job.said.read_text(errors="replace").strip().splitlines()[-2:])[:300]


def resumed(tally: Tally) -> str:
    return f"{len(tally.dead)} of {tally.runs} runs failed, {len(tally.unlike)} parts differ"


def kill(place: Place) -> list[Row]:
    """SIGKILL, while every step writes a checkpoint."""
    random = Random(place.seed)

    def hit(job: Job, tally: Tally, number: int) -> bool:
        if not job.waited(random, start=1.5, spread=1.0):
            return False
        phase, _ = shown()
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        tally.hits[phase] += 1
        tally.corrupt += corrupt(job.folder / "checkpoints")
        return True

    words = [f"trainer.max_steps={STEPS}", "save_every_seconds=0"]
    tally = place.tally("kill", words, hit, hits=place.kills)
    where = ", ".join(f"{n} in {phase}" for phase, n in tally.hits.most_common())
    kills = f"kill -9, {tally.hits.total()} times ({where})"
    return [
        Row(f"{kills}: cannot resume", f"{len(tally.dead)} of {tally.runs} runs", "0",
            not tally.dead, tally.record()),
        Row("... corrupt checkpoints", f"{len(tally.corrupt)}", "0", not tally.corrupt),
        Row("... end unlike an undisturbed run", f"{len(tally.unlike)} parts", "0",
            not tally.unlike),
    ]  # fmt: skip


def term(place: Place) -> Iterator[Row]:
    """SIGTERM, to the process that was started or to one rank of two."""
    few = max(1, place.kills // 5)
    yield from terminated(place, "1 rank", ranks=1, hits=place.kills)
    yield from terminated(place, "2 ranks", ranks=2, hits=place.kills)
    yield from terminated(place, "2 ranks, commands of their own", ranks=2, hits=few, real=True)


def terminated(place: Place, name: str, *, ranks: int, hits: int, real: bool = False) -> list[Row]:
    random = Random(place.seed + ranks)

    def hit(job: Job, tally: Tally, number: int) -> bool:
        if not job.waited(random, start=2.0 + 7 * real, spread=1.0 + 3 * real):
            return False
        whom = job.process.pid
        if ranks > 1 and number % 2 and len(job.ranks()) == ranks:
            whom = job.ranks()[number // 2 % ranks]
        phase, _ = shown()
        os.kill(whom, signal.SIGTERM)
        code, seconds = job.ended()
        tally.hits[phase if not real else "any"] += 1
        tally.codes[str(code)] += 1
        tally.seconds.append(seconds)
        if code not in (0, 143):
            target = "the job" if whom == job.process.pid else f"a rank ({number // 2 % ranks})"
            tally.bad.append(f"exit {code}, {target} in {phase}: {said_of(job)}")
        if not real and shown()[1]:
            tally.lost.append(shown()[1] - steps_in(job.folder))
        return True

    steps = [f"trainer.max_steps={STEPS}", f"trainer.devices={ranks}"]
    tally = place.tally(f"term-{ranks}{'-real' * real}", steps, hit, hits=hits, real=real)
    hangs = tally.codes["None"]
    others = sum(n for code, n in tally.codes.items() if code not in ("0", "143", "None"))
    where = ", ".join(f"{n} in {phase}" for phase, n in tally.hits.most_common())
    long, lost = max(tally.seconds), max(tally.lost, default=0)
    detail = tally.record() | {
        "median_seconds_to_leave": round(median(tally.seconds), 2),
        "longest_seconds_to_leave": round(long, 2),
        "most_steps_lost": lost,
    }
    rows = [
        Row(f"SIGTERM, {name}, {tally.hits.total()} times ({where}): hangs", str(hangs), "0",
            not hangs, detail),
        Row("... exit codes other than 143", str(others), "0", not others),
        Row("... seconds to leave, median and most", f"{median(tally.seconds):.1f}, {long:.1f}",
            f"<= {LEAVE_SECONDS}", long <= LEAVE_SECONDS),
        Row("... cannot resume, or end unlike", resumed(tally), "0",
            not tally.dead and not tally.unlike),
    ]  # fmt: skip
    if not real:
        rows.insert(3, Row("... steps lost, at most", str(lost), "<= 1", lost <= 1))
    return rows


def ranks(place: Place) -> Iterator[Row]:
    """One rank of two is killed, or stopped: the other one names it."""
    few = max(2, place.kills // 5)
    for real, hits in ((False, few), (True, 2)):
        most = TIMEOUT_SECONDS + 3 * PULSE_SECONDS + GRACE_SECONDS
        yield lost_rank(place, signal.SIGKILL, hits=hits, most=most, real=real)
        yield lost_rank(place, signal.SIGSTOP, hits=hits, most=most, real=real)
    yield from orphans(place, hits=few)


def orphans(place: Place, *, hits: int) -> Iterator[Row]:
    """SIGKILL to the process that watches two ranks: they must not train on unseen."""
    random = Random(place.seed)

    def hit(job: Job, tally: Tally, number: int) -> bool:
        if not job.into(("training", "validation", "checkpoint")):
            return False
        if not job.until(time.monotonic() + random.uniform(0, 1)) or len(job.ranks()) < 2:
            return False
        begun, ranks = time.monotonic(), job.ranks()
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        while any(map(runs, ranks)) and time.monotonic() < begun + PATIENCE_SECONDS:
            time.sleep(0.01)
        tally.hits["any"] += 1
        tally.seconds.append(time.monotonic() - begun)
        for rank in filter(runs, ranks):
            tally.bad.append(f"{rank} trains on")
            os.kill(rank, signal.SIGKILL)
        return True

    words = [f"trainer.max_steps={STEPS}", "trainer.devices=2"]
    tally = place.tally("orphans", words, hit, hits=hits)
    long = max(tally.seconds)
    found = f"{len(tally.bad)} train on, {long:.1f} s to leave at most, {resumed(tally)}"
    good = not (tally.bad or tally.dead or tally.unlike) and long <= LEAVE_SECONDS
    yield Row(
        f"the process that started two ranks meets SIGKILL, {tally.hits.total()} times",
        found,
        f"0, <= {LEAVE_SECONDS} s, 0, 0",
        good,
        tally.record() | {"longest_seconds": round(long, 1)},
    )


def lost_rank(
    place: Place, number: signal.Signals, *, hits: int, most: float, real: bool = False
) -> Row:
    random = Random(place.seed)

    def hit(job: Job, tally: Tally, nth: int) -> bool:
        begun = time.time()
        path = job.folder / "checkpoints" / "last.ckpt"
        while real and not (path.exists() and path.stat().st_mtime > begun):
            if not job.until(time.monotonic() + 0.01):
                return False
        if not real and not job.into(("training", "validation", "checkpoint")):
            return False
        if not job.until(time.monotonic() + random.uniform(0, 1)) or len(job.ranks()) < 2:
            return False
        phase, _ = shown()
        os.kill(job.ranks()[nth % 2], number)
        code, seconds = job.ended()
        tally.hits[phase if not real else "any"] += 1
        tally.codes[str(code)] += 1
        tally.seconds.append(seconds)
        said = job.said.read_text(errors="replace")
        if code == 0:
            tally.hits["end"] += 1  # it was done already
        elif code != 4 or f"rank {nth % 2} " not in said:
            tally.bad.append(f"exit {code}, rank {nth % 2} in {phase}: {said_of(job)}")
        return True

    words = [f"trainer.max_steps={STEPS}", "trainer.devices=2", "save_every_seconds=0"]
    words += [f"trainer.timeout_seconds={TIMEOUT_SECONDS}"]
    name = f"{number.name.lower()}{'-real' * real}"
    tally = place.tally(name, words, hit, hits=hits, real=real)
    long = max(tally.seconds)
    good = not tally.bad and not tally.dead and not tally.unlike and long <= most + 2
    found = f"{len(tally.bad)} without exit 4 and its name, {long:.1f} s at most, {resumed(tally)}"
    own = ", commands of their own" if real else ""
    return Row(
        f"a rank of two meets {number.name}, {tally.hits.total()} times{own}",
        found,
        f"0, <= {most + 2:.0f} s, 0, 0",
        good,
        tally.record() | {"longest_seconds": round(long, 1)},
    )


def costs(place: Place) -> list[Row]:
    """What several ranks gain."""
    found = scaling(place.folder)
    share = found["efficiency"]
    return [
        Row("2 ranks on 2 cores beside 1 on 1 (weak): t1 / t2", f"{100 * share:.0f} %", ">= 85 %",
            share >= 0.85, found),
    ]  # fmt: skip


def hooks(place: Place) -> list[Row]:
    """What the callbacks take of a step of the default job."""
    found = overhead(place.folder)
    share = found["share"]
    return [
        Row("what this costs a step of the default job", f"{100 * share:.2f} %", "<= 1 %",
            share <= 0.01, found),
    ]  # fmt: skip


PARTS: dict[str, Callable[[Place], Iterable[Row]]] = {
    "kill": kill,
    "term": term,
    "ranks": ranks,
    "scaling": costs,
    "overhead": hooks,
}


def quick(place: Place) -> Iterator[Row]:
    """Two kills, and a signal with one rank and with two."""
    yield from kill(place)
    yield from terminated(place, "1 rank", ranks=1, hits=1)
    yield from terminated(place, "2 ranks", ranks=2, hits=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--kills", type=int, default=50, help="with each signal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a short form")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-chaos.json")
    options = parser.parse_args()
    if set(options.parts) - set(PARTS):
        parser.error(f"the parts are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # of runs that went on
    os.environ["OMP_NUM_THREADS"] = "1"
    instrument()
    scratch = Path(tempfile.mkdtemp())  # no context manager: forked children must not end it
    place = Place(scratch, 2 if options.quick else options.kills, options.seed, list(SMALL))
    place.words += [f"data.root={scratch / 'synthetic'}", f"data.cache={scratch / 'prepared'}"]
    rows: list[Row] = []
    try:
        for part in ["quick"] if options.quick else options.parts or PARTS:
            its = []
            for row in quick(place) if options.quick else PARTS[part](place):
                print(f"{'ok ' if row.good else 'BAD'} {row.check}: {row.found} ({row.goal})")
                for fault in row.detail.get("faults", []):
                    print(f"      {fault}")
                sys.stdout.flush()
                its.append(row)
            rows += its
            if not options.quick:
                record(part, its, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return int(not all(row.good for row in rows))


def record(part: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Put a part's rows into the file, beside those of the others."""
    path: Path = options.output
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {"command": "python scripts/chaos.py", "versions": run_report.collect_versions()}
    found.setdefault("parts", {})[part] = {
        "command": f"python scripts/chaos.py {part} --kills {options.kills} --seed {options.seed}",
        "rows": [
            {"check": r.check, "found": r.found, "goal": r.goal, "good": r.good, **r.detail}
            for r in rows
        ],
    }
    run_report.write_report(found, path)


if __name__ == "__main__":
    sys.exit(main())
