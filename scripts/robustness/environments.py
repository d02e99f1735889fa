"""Run commands in hostile environments: signals, limits, variables, clocks, names, other commands.

    python -m scripts.robustness.environments                # all, into benchmarks/
    python -m scripts.robustness.environments --match SIGHUP # some; writes nothing
    python -m scripts.robustness.environments --match SIGHUP --update # replaces their results
    python -m scripts.robustness.environments --list

Each scenario (environment_scenarios.py) is a sentence, and starts commands as users do, in a folder
of its own. A command must go on, or end with one line and a documented exit code, without a
traceback and without leaving temporary files or locks; then it must succeed where nothing is in its
way, and an interrupted training must end with the weights of an uninterrupted one.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import scripts.robustness.environment_scenarios  # noqa: F401  (fills SCENARIOS)
from scripts.robustness.scenario import (
    ROOT,
    SCENARIOS,
    TRAIN_HERE,
    Failure,
    Folder,
    NotTried,
    Scenario,
)
from unet3d.report.run_report import collect_versions, write_report

OUTPUT = ROOT / "benchmarks" / "cpu-environments.json"


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario: passed, failed, or not tried here."""

    verdict: str
    reason: str
    seconds: float


def try_scenario(item: Scenario, scratch: Path, original: Path) -> Outcome:
    """Run a scenario in a new folder."""
    folder = Folder(Path(tempfile.mkdtemp(dir=scratch)), original)
    start, verdict, reason = time.monotonic(), "passed", ""
    try:
        item.hold(folder)
    except Failure as failure:
        verdict, reason = "failed", str(failure)
    except NotTried as obstacle:
        verdict, reason = "not tried here", str(obstacle)
    finally:
        folder.end_all()
        shutil.rmtree(folder.path, ignore_errors=True)
    return Outcome(verdict, reason, time.monotonic() - start)


def create_original(original: Path) -> None:
    """Train without disturbance; its weights are what all others must reach."""
    original.mkdir()
    folder = Folder(original, original)
    folder.expect(folder.run(TRAIN_HERE), 0)
    shutil.copy(original / "run/checkpoints/last.ckpt", original / "run.ckpt")
    for name, source in (("scans", "imagesTr"), ("labels", "labelsTr")):
        (original / name).mkdir()
        for file in sorted(original.glob(f"set/*/{source}/*"))[:3]:
            shutil.copy(file, original / name)


def build_report(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the result file."""
    counts = Counter(case["verdict"] for case in cases)
    return {
        "command": "python -m scripts.robustness.environments",
        "versions": collect_versions(),
        "scenarios": len(cases),
        **{verdict: counts[verdict] for verdict in ("passed", "failed", "not tried here")},
        "cases": list(cases),
    }


def update_results(path: Path, case: dict[str, Any]) -> None:
    """Replace the result of a scenario; those of scenarios that no longer exist are dropped."""
    old = json.loads(path.read_text("utf-8"))["cases"] if path.exists() else []
    cases = {known["scenario"]: known for known in (*old, case)}
    kept = [cases[item.sentence] for item in SCENARIOS if item.sentence in cases]
    write_report(build_report(kept), path)


def main() -> int:
    """Try all scenarios, or some."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.robustness.environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--match", default="", help="regular expression for sentences")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at a time")
    parser.add_argument("--update", action="store_true", help="replace the results of some")
    parser.add_argument("--list", action="store_true", help="print the sentences")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    items = [item for item in SCENARIOS if re.search(options.match, item.sentence)]
    if options.list:
        print(*(item.sentence for item in items), sep="\n")
        return 0
    if not items:
        parser.error("no scenario matches --match")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or commands would ignore it
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        scratch = Path(name).resolve()
        scratch.chmod(0o755)
        create_original(scratch / "original")
        lock = Lock()

        def run(item: Scenario) -> dict[str, Any]:
            outcome = try_scenario(item, scratch, scratch / "original")
            reason = f": {outcome.reason}" if outcome.reason else ""
            sys.stdout.write(f"{outcome.verdict}: {item.sentence}{reason}\n")
            sys.stdout.flush()
            case = {
                "scenario": item.sentence,
                "verdict": outcome.verdict,
                **({"reason": outcome.reason} if outcome.reason else {}),
                "seconds": round(outcome.seconds, 1),
            }
            if options.update:
                with lock:
                    update_results(options.output, case)
            return case

        with ThreadPoolExecutor(options.jobs) as pool:
            cases = list(pool.map(run, items))
    report = build_report(cases)
    print(f"{report['scenarios']} scenarios: {report['passed']} passed, {report['failed']} failed")
    if len(items) == len(SCENARIOS):
        write_report(report, options.output)
    return int(report["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
