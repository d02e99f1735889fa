"""Compare a recording of a GPU with the model of the allocator and with the estimated step."""

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from unet3d.memory.address_replay import AddressReplay, replay_addresses
from unet3d.memory.allocator import SMALL, round_block_size
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.recording import Recording, list_requests
from unet3d.text import format_columns
from unet3d.units import format_bytes

MAX_ROWS = 40
"""Differences that a table has; JSON has all."""


@dataclass(frozen=True)
class Difference:
    """An event that only one side has; bytes are negative where freed."""

    event: int  # number in the recorded step, or where the event would be
    recorded: int | None
    estimated: int | None
    origin: str  # operation and module of the estimated block


@dataclass(frozen=True)
class Comparison:
    """What a recording has shown of the model and of the estimate."""

    recording: Recording
    replay: AddressReplay
    estimate: MemoryEstimate
    num_recorded: int  # events of the last step, with more than 1 MiB
    num_equal: int
    differences: list[Difference]

    @property
    def errors(self) -> dict[str, float]:
        """Return the signed errors of the estimated peaks, in percent."""
        peak, recording = self.estimate.peak, self.recording
        pairs = {
            "allocated": (peak.allocated or 0, recording.peak_allocated),
            "reserved": (peak.reserved or 0, recording.peak_reserved),
        }
        return {name: 100 * (ours / real - 1) for name, (ours, real) in pairs.items() if real}


def compare_recording(recording: Recording, estimate: MemoryEstimate) -> Comparison:
    """Compare the last recorded step with the steady step of the estimate.

    Events of at most 1 MiB share segments and are left out: kernels differ in their small
    temporaries, and all of them together take a few MiB.
    """
    start, stop = recording.step_starts[-2:]
    requests = list_requests(recording.events[start:stop])
    recorded = [n for n in map(_round, requests) if abs(n) > SMALL]
    blocks = [
        (1 if event > 0 else -1, estimate.trace.blocks[abs(event) - 1])
        for event in estimate.trace.events[slice(*estimate.steady_step)]
    ]
    estimated = [(_round(sign * block.nbytes), block) for sign, block in blocks]
    estimated = [(n, block) for n, block in estimated if abs(n) > SMALL]
    sizes = [n for n, _ in estimated]
    differences, num_equal = [], 0
    for tag, i, j, k, m in SequenceMatcher(None, recorded, sizes, autojunk=False).get_opcodes():
        if tag == "equal":
            num_equal += j - i
            continue
        differences += [Difference(n, recorded[n], None, "") for n in range(i, j)]
        differences += [
            Difference(j, None, n, f"{block.op} {block.path}".strip())
            for n, block in estimated[k:m]
        ]
    replay = replay_addresses(recording.before, recording.events)
    return Comparison(recording, replay, estimate, len(recorded), num_equal, differences)


def _round(nbytes: int) -> int:
    size = round_block_size(abs(nbytes))
    return size if nbytes > 0 else -size


def format_comparison(comparison: Comparison) -> str:
    """Format what agrees, and a row for each event that one side only has."""
    recording, replay = comparison.recording, comparison.replay
    machine = recording.machine
    placed = replay.blocks - len(replay.misplaced)
    error = 100 * (replay.reserved / recording.reserved_after - 1)
    rows = [
        ("recorded", f"{machine['gpu']}, torch {machine['torch']}, cuDNN {machine['cudnn']}"),
        ("blocks at the modeled address", f"{placed:,} of {replay.blocks:,}"),
        ("reserved by the modeled allocator", f"{error:+.2f}%"),
        ("events above 1 MiB as estimated", f"{comparison.num_equal} of {comparison.num_recorded}"),
    ]
    peak = comparison.estimate.peak
    for name, ours, real in (
        ("allocated", peak.allocated, recording.peak_allocated),
        ("reserved", peak.reserved, recording.peak_reserved),
    ):
        words = f"{format_bytes(ours or 0)} estimated, {format_bytes(real)} recorded"
        rows.append((f"peak {name}", f"{words} ({comparison.errors[name]:+.2f}%)"))
    parts = [format_columns(rows, left=2)]
    if differences := comparison.differences:
        table = [("event", "estimated by", "recorded", "estimated")]
        table += [
            (str(d.event), d.origin, _format_change(d.recorded), _format_change(d.estimated))
            for d in differences[:MAX_ROWS]
        ]
        parts.append(format_columns(table, left=2))
        if len(differences) > MAX_ROWS:
            parts.append(f"{len(differences) - MAX_ROWS} more differences: format=json has all")
    return "\n\n".join(parts)


def _format_change(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes:+,}"


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON-compatible values; sizes are whole bytes."""
    recording, peak = comparison.recording, comparison.estimate.peak
    return {
        "machine": recording.machine,
        "job": recording.job,
        "blocks": comparison.replay.blocks,
        "misplaced_blocks": len(comparison.replay.misplaced),
        "recorded_bytes": {
            "allocated": recording.peak_allocated,
            "reserved": recording.peak_reserved,
        },
        "estimated_bytes": peak.known(),
        "error_percent": comparison.errors,
        "events": comparison.num_recorded,
        "equal_events": comparison.num_equal,
        "differences": [vars(difference) for difference in comparison.differences],
    }
