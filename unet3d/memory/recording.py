"""A recording of what a real GPU allocated in three training steps: figures only, in one file.

It has sizes, relative addresses and totals, but no stack traces, paths or names of files, so it can
be attached to an issue.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unet3d.atomic_write import atomic_write
from unet3d.errors import UsageError
from unet3d.memory.address_replay import Event, Segment

SCHEMA = "unet3d-recording-1"
"""Name and version of the file's format."""

STEPS = 3

ACTIONS = {
    "segment_alloc": "s",
    "segment_map": "s",
    "alloc": "a",
    "free_completed": "f",
    "segment_free": "r",
    "segment_unmap": "r",
}
"""torch's names of events, and those of the file. Others change no block."""

Snapshot = Mapping[str, Any]
"""What torch.cuda.memory._snapshot returns."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The events of some steps on a GPU; a size is what was requested, without rounding."""

    machine: dict[str, Any]
    job: dict[str, Any]  # what the estimate is made from
    cublas_bytes: int  # of a workspace
    before: list[Segment]  # as the first step begins
    events: list[Event]
    step_starts: list[int]  # numbers of events; the last one is the end of the last step
    peak_allocated: int  # in the last step
    peak_reserved: int
    reserved_after: int
    unet3d: str
    schema: str = SCHEMA


def write_recording(recording: Recording, path: Path) -> None:
    """Write a recording as compressed JSON."""
    with atomic_write(path) as draft, gzip.open(draft, "wt", encoding="utf-8") as file:
        json.dump(asdict(recording), file)


def read_recording(path: Path) -> Recording:
    """Read a recording; UsageError if the file is none."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise UsageError(f"recording={path} does not exist; measure=true writes it") from None
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"recording={path} is not a recording: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"recording={path} has the format {schema!r}, expected {SCHEMA!r}")
    try:
        return Recording(**content)
    except TypeError as error:
        raise UsageError(f"recording={path} is not a recording: {error}") from error


def record_allocations(
    run_step: Callable[[], None],
    take_snapshot: Callable[[], Snapshot],
    reset_peak: Callable[[], None],
) -> tuple[list[Segment], list[Event], list[int]]:
    """Run three steps; return the segments before them, their events and where steps begin."""
    before = take_snapshot()
    starts = [0]
    for _ in range(STEPS):
        reset_peak()
        run_step()
        starts.append(len(list_events(take_snapshot())))
    events = list_events(take_snapshot())
    segments = list_segments(before)
    addresses = [start for start, *_ in segments] + [address for _, address, _ in events]
    origin = min(addresses, default=0)
    moved: list[Segment] = [
        [start - origin, size, kind, [[address - origin, n] for address, n in live]]
        for start, size, kind, live in segments
    ]
    return moved, [[what, address - origin, n] for what, address, n in events], starts


def list_segments(snapshot: Snapshot) -> list[Segment]:
    """Return the segments of the default stream, with their live blocks."""
    return [
        [
            segment["address"],
            segment["total_size"],
            segment["segment_type"],
            [
                [block["address"], block["requested_size"]]
                for block in segment["blocks"]
                if block["state"] != "inactive"
            ],
        ]
        for segment in snapshot["segments"]
        if segment["stream"] == 0
    ]


def list_events(snapshot: Snapshot) -> list[Event]:
    """Return the events of the default stream that change blocks or segments."""
    return [
        [ACTIONS[entry["action"]], entry["addr"], entry["size"]]
        for trace in snapshot["device_traces"][:1]
        for entry in trace
        if entry["action"] in ACTIONS and entry["stream"] == 0
    ]


def list_requests(events: Sequence[Event]) -> list[int]:
    """Return what was requested (> 0) and freed (< 0), in order.

    >>> list_requests([["s", 0, 2097152], ["a", 0, 100], ["f", 0, 100]])
    [100, -100]
    """
    return [size if what == "a" else -size for what, _, size in events if what in "af"]
