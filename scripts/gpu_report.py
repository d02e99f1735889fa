"""Everything that needs a GPU, in parts that can be run one by one and continued: `make gpu`.

    python scripts/gpu_report.py --list
    python scripts/gpu_report.py                     # what is missing, for nine minutes
    python scripts/gpu_report.py pool forum          # these; rows that failed are tried again
    python scripts/gpu_report.py --output FOLDER     # begins with what benchmarks/ has
    python scripts/gpu_report.py --rehearse          # all of it on a CPU, in its smallest form

Each part is a process of its own, which hands over every row as it is found: a crash, an error of
CUDA or a limit of time loses the row that was under way. Results go into <device>.json; without a
GPU it says so and leaves with 2. The device's settings are read and never changed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts import PARTS, Part

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
WORKER = Path(__file__).with_name("gpu_rows.py")
GRACE = 30
"""Seconds beyond --seconds in which what has begun may end."""
STOPPING = 5
"""Seconds between asking a process to end and ending it."""

# One part.


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of this script: on what, how long, and who hears of rows."""

    device: str
    tiny: bool
    ends: float  # nothing is begun after it; GRACE later all is ended
    scratch: Path
    data: Path
    save: Callable[[], None]
    worker: Path = WORKER


def run_part(name: str, part: Part, found: dict[str, Any], call: Call) -> None:
    """Measure the rows that `found` lacks, in as many processes as it takes."""
    begun = time.time()
    last = min(begun + part.limit, call.ends)
    rows, failed = found.setdefault("rows", {}), found.setdefault("failed", {})
    while True:
        known = len(rows) + len(failed)
        names, code = worked(name, part, [*rows, *failed], found, call, begun)
        if names is None:
            failed["(start)"] = f"exit code {code}: {tail(call.scratch / f'{name}.log')}"
            found["state"] = "failed"
            break
        if set(names) <= {*rows, *failed}:
            found["state"] = "failed" if failed else "done"
            break
        found["state"] = "cut off"
        over = code in (0, None)  # out of time, there or here
        if over or len(rows) + len(failed) == known or time.time() + part.least > last:
            break
    found["seconds"] = round(found.get("seconds", 0) + time.time() - begun, 1)
    try:
        found["summary"] = part.summary(rows)
    except Exception as error:  # the rows are what counts
        found["summary"] = {"error": f"{type(error).__name__}: {error}"}
    call.save()


def worked(
    name: str, part: Part, skip: list[str], found: dict[str, Any], call: Call, begun: float
) -> tuple[list[str] | None, int | None]:
    """One process: the names of all rows, if it told them, and its exit code; None: ended here."""
    told, log = call.scratch / f"{name}.told", call.scratch / f"{name}.log"
    told.unlink(missing_ok=True)
    ends = min(begun + part.limit, call.ends + GRACE)
    order = {
        **{"module": part.module, "part": name, "skip": skip, "device": call.device},
        **{"tiny": call.tiny, "least": 0 if call.tiny else part.least, "until": ends},
        **{"scratch": str(call.scratch), "data": str(call.data), "told": str(told)},
    }
    (call.scratch / f"{name}.order").write_text(json.dumps(order))
    with (call.scratch / f"{name}.order").open() as given, log.open("a") as said:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(call.worker)],
            **{"cwd": ROOT, "stdin": given, "stdout": said, "stderr": said},
            start_new_session=True,
        )
    events: list[dict[str, Any]] = []
    code = None
    while code is None and time.time() < ends:
        time.sleep(0.1)
        code = process.poll()
        lines = told.read_text().split("\n")[:-1] if told.exists() else []
        for line in lines[len(events) :]:
            events.append(json.loads(line))
            if "name" in events[-1]:
                heard(events[-1], found, call)
    if code is None:
        end(process)
    begins = [event["begun"] for event in events if "begun" in event]
    lost = events and "begun" in events[-1]
    if lost and (code is not None or (len(begins) == 1 and begun + part.limit <= call.ends)):
        why = f"over the limit of {part.limit} s" if code is None else f"exit code {code}"
        heard({"name": begins[-1], "error": f"{why}: {tail(log)}"}, found, call)
    return next((event["names"] for event in events if "names" in event), None), code


def heard(event: dict[str, Any], found: dict[str, Any], call: Call) -> None:
    """Keep a row, or why there is none."""
    name = event["name"]
    if "error" in event:
        found["failed"][name] = event["error"]
        print(f"    {name}: {event['error'][:300]}", flush=True)
    else:
        found["rows"][name] = event["value"] | {"seconds": event["seconds"]}
        print(f"    {name} ({event['seconds']} s)", flush=True)
    call.save()


def end(process: subprocess.Popen) -> None:
    """Ask the process and those it began to leave, then make them."""
    for number, seconds in ((signal.SIGTERM, STOPPING), (signal.SIGKILL, 60)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def tail(log: Path) -> str:
    """The end of what a process said."""
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


# All of them.


def device_name() -> str | None:
    """What torch calls the first GPU; asked in a process of its own, which leaves nothing there."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    words = done.stdout.strip().splitlines()
    return words[-1] if words else None


def missing(parts: dict[str, Any]) -> list[str]:
    """The parts that have not been measured to their end."""
    ended = ("done", "failed")
    return [name for name in PARTS if parts.get(name, {}).get("state") not in ended]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="none: what is missing")
    parser.add_argument("--list", action="store_true", help="say what there is, and leave")
    parser.add_argument("--seconds", type=float, default=540, help="nothing is begun after them")
    parser.add_argument("--output", type=Path, default=BENCHMARKS, help="folder of the results")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="where data sets lie")
    parser.add_argument("--again", action="store_true", help="forget what the named parts have")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny; no results")
    given = parser.parse_args(argv)
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}; the parts are {', '.join(PARTS)}")
    if given.rehearse and given.output.resolve() == BENCHMARKS:
        given.output = Path(tempfile.mkdtemp(prefix="gpu-rehearsal-"))
    return given


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    begun = time.time()
    name = "rehearsal" if given.rehearse else None if given.list else device_name()
    if not given.list and not name:
        print("gpu_report needs a GPU, and torch finds none here; --rehearse", file=sys.stderr)
        return 2
    if given.list:
        for part, what in PARTS.items():
            print(f"{part:12} {what.limit:4} s  {what.about}")
        return 0
    assert name is not None
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = given.output / f"{slug}.json"
    before = next((p for p in (path, BENCHMARKS / path.name) if p.is_file()), None)
    results: dict[str, Any] = {"device": name, "parts": {}}
    if before is not None:
        results = json.loads(before.read_text())
    parts: dict[str, Any] = results["parts"]
    given.output.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(results, indent=1) + "\n")
        draft.replace(path)

    for part in given.parts:
        if given.again:
            parts.pop(part, None)
        elif part in parts:
            parts[part]["failed"] = {}
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as scratch:
        call = Call(
            device="cpu" if given.rehearse else "cuda:0",
            tiny=given.rehearse,
            ends=begun + given.seconds,
            scratch=Path(scratch),
            data=given.data.resolve(),
            save=save,
        )
        for part in given.parts or missing(parts):
            seconds = call.ends - time.time()
            if seconds < PARTS[part].least and not given.rehearse:
                left.append(part)
                continue
            print(f"{part}: {PARTS[part].about}", flush=True)
            found = parts.setdefault(part, {})
            run_part(part, PARTS[part], found, call)
            print(f"  {found['state']}: {json.dumps(found['summary'])[:1500]}", flush=True)
            if found["state"] == "cut off":
                left.append(part)
        if given.output.resolve() != BENCHMARKS:
            logs = [
                f"{log.stem}\n{log.read_text()[-(2**20) :]}" for log in Path(scratch).glob("*.log")
            ]
            path.with_suffix(".log").write_text("\n".join(logs))
    if left:
        print(f"left for another call: {', '.join(left)}")
    print(f"wrote {path}, after {time.time() - begun:.0f} s")
    return 0 if all(parts[p]["state"] != "failed" for p in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
