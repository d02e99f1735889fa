"""Run everything that needs a GPU, in parts that can be run separately and continued: `make gpu`.

    python -m scripts.gpu.report --list
    python -m scripts.gpu.report                  # unfinished parts, for nine minutes
    python -m scripts.gpu.report pool forum       # these parts; failed rows are repeated
    python -m scripts.gpu.report --output FOLDER  # continues the results in benchmarks/
    python -m scripts.gpu.report --rehearse       # all parts on a CPU, in their smallest form

Each part runs in a process of its own that reports every row at once: a crash, a CUDA error or a
time limit costs only the row that was being measured. Results are written to <device>.json. Without
a GPU, the exit code is 2. The settings of the device are read, never changed.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu.parts import PARTS, Part
from unet3d.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
GRACE_SECONDS = 30
"""Time after --seconds in which a running row may finish."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The settings of one call of this script."""

    device: str
    tiny: bool
    deadline: float  # no row starts later; GRACE_SECONDS after it, processes are killed
    scratch: Path
    data: Path
    save: Callable[[], None]
    worker: Sequence[str] = ("-m", "scripts.gpu.rows")


def run_part(name: str, part: Part, result: dict[str, Any], call: Call) -> None:
    """Measure the missing rows of a part, in as many processes as it takes."""
    start = time.time()
    deadline = min(start + part.limit_seconds, call.deadline)
    rows, failed = result.setdefault("rows", {}), result.setdefault("failed", {})
    while True:
        measured = len(rows) + len(failed)
        names, code = run_worker(name, part, result, call, start)
        if names is None:
            failed["(start)"] = f"exit code {code}: {read_tail(call.scratch / f'{name}.log')}"
            result["state"] = "failed"
            break
        if set(names) <= {*rows, *failed}:
            result["state"] = "failed" if failed else "done"
            break
        result["state"] = "cut off"
        out_of_time = code in (0, None)  # the worker stopped in time, or was killed
        no_progress = len(rows) + len(failed) == measured
        if out_of_time or no_progress or time.time() + part.min_seconds > deadline:
            break
    result["seconds"] = round(result.get("seconds", 0) + time.time() - start, 1)
    call.save()


def run_worker(
    name: str, part: Part, result: dict[str, Any], call: Call, start: float
) -> tuple[list[str] | None, int | None]:
    """Measure rows in one process.

    Return the names of all rows (None if the worker did not get that far) and the exit code (None
    if the worker was killed because time was up).
    """
    events_file, log, job_file = (
        call.scratch / f"{name}.{kind}" for kind in ("events", "log", "job")
    )
    events_file.unlink(missing_ok=True)
    deadline = min(start + part.limit_seconds, call.deadline + GRACE_SECONDS)
    job = {
        **{"module": f"scripts.gpu.{part.module}", "part": name, "device": call.device},
        **{"skip": [*result["rows"], *result["failed"]], "tiny": call.tiny},
        **{"min_seconds": 0 if call.tiny else part.min_seconds, "deadline": deadline},
        **{"scratch": str(call.scratch), "data": str(call.data), "events": str(events_file)},
    }
    job_file.write_text(json.dumps(job))
    with job_file.open() as stdin, log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *call.worker],
            **{"cwd": ROOT, "stdin": stdin, "stdout": output, "stderr": output},
            start_new_session=True,
        )
    events: list[dict[str, Any]] = []
    code = None
    while code is None and time.time() < deadline:
        time.sleep(0.1)
        code = process.poll()
        lines = events_file.read_text().split("\n")[:-1] if events_file.exists() else []
        for line in lines[len(events) :]:
            events.append(json.loads(line))
            if "name" in events[-1]:
                store_row(events[-1], result, call)
    if code is None:
        stop(process)
    started = [event["started"] for event in events if "started" in event]
    unfinished = events and "started" in events[-1]
    used_whole_limit = len(started) == 1 and start + part.limit_seconds <= call.deadline
    if unfinished and (code is not None or used_whole_limit):
        why = f"over the limit of {part.limit_seconds} s" if code is None else f"exit code {code}"
        store_row({"name": started[-1], "error": f"{why}: {read_tail(log)}"}, result, call)
    return next((event["names"] for event in events if "names" in event), None), code


def store_row(event: dict[str, Any], result: dict[str, Any], call: Call) -> None:
    """Save a row, or the reason why it failed."""
    name = event["name"]
    if "error" in event:
        result["failed"][name] = event["error"]
        print(f"    {name}: {event['error'][:300]}", flush=True)
    else:
        result["rows"][name] = event["value"] | {"seconds": event["seconds"]}
        wrong = ", wrong" if event["value"].get("good") is False else ""
        print(f"    {name} ({event['seconds']} s{wrong})", flush=True)
    call.save()


def stop(process: subprocess.Popen) -> None:
    """Terminate a process and its children; kill them if they do not exit in time."""
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 60)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def read_tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


def get_device_name() -> str | None:
    """Return the name of the first GPU; a child asks torch, so that this process uses no GPU."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    words = done.stdout.strip().splitlines()
    return words[-1] if words else None


def list_unfinished(parts: dict[str, Any]) -> list[str]:
    """Return the parts that were not measured to their end."""
    return [name for name in PARTS if parts.get(name, {}).get("state") not in ("done", "failed")]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: unfinished parts")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--seconds", type=float, default=540, help="no row starts later")
    parser.add_argument("--output", type=Path, default=BENCHMARKS, help="folder of the results")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of datasets")
    parser.add_argument("--again", action="store_true", help="repeat all rows of the named parts")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU; keeps no results")
    options = parser.parse_args(argv)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; choose from {', '.join(PARTS)}")
    if options.rehearse and options.output.resolve() == BENCHMARKS:
        options.output = Path(tempfile.mkdtemp(prefix="gpu-rehearsal-"))
    return options


def run_parts(options: argparse.Namespace, parts: dict[str, Any], call: Call) -> None:
    """Run the named or the unfinished parts."""
    for name in options.parts:
        if options.again:
            parts.pop(name, None)
        elif name in parts:
            parts[name]["failed"] = {}
    unfinished: list[str] = []
    for name in options.parts or list_unfinished(parts):
        part = PARTS[name]
        if call.deadline - time.time() < part.min_seconds and not options.rehearse:
            unfinished.append(name)
            continue
        print(f"{name}: {part.about}", flush=True)
        result = parts.setdefault(name, {})
        run_part(name, part, result, call)
        print(f"  {result['state']}", flush=True)
        if result["state"] == "cut off":
            unfinished.append(name)
    if unfinished:
        print(f"unfinished, run again: {', '.join(unfinished)}")


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:12} {part.limit_seconds:4} s  {part.about}")
        return 0
    device = "rehearsal" if options.rehearse else get_device_name()
    if not device:
        print("scripts.gpu.report needs a GPU; --rehearse tries it on a CPU", file=sys.stderr)
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = options.output / f"{slug}.json"
    previous = next((p for p in (path, BENCHMARKS / path.name) if p.is_file()), None)
    results: dict[str, Any] = {"device": device, "parts": {}}
    if previous is not None:
        results = json.loads(previous.read_text())
    options.output.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        with atomic_write(path) as draft:
            draft.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        call = Call(
            device="cpu" if options.rehearse else "cuda:0",
            tiny=options.rehearse,
            deadline=time.time() + options.seconds,
            scratch=Path(folder),
            data=options.data.resolve(),
            save=save,
        )
        run_parts(options, results["parts"], call)
        if options.output.resolve() != BENCHMARKS:
            logs = [
                f"{log.stem}\n{log.read_text()[-(2**20) :]}" for log in call.scratch.glob("*.log")
            ]
            path.with_suffix(".log").write_text("\n".join(logs))
    print(f"wrote {path}")
    return 0 if all(part["state"] != "failed" for part in results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
