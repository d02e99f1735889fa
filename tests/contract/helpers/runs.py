"""Break a run from the outside, and read what it leaves."""

import csv
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

FAULTS = "tests.contract.helpers.faults"


def add_faults(folder: Path, *callbacks: str, **settings: Any) -> list[str]:
    """Write conf/callbacks/fault.yaml into the working folder; return the options that use it."""
    path = folder / "conf" / "callbacks" / "fault.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {}
    for name in callbacks:
        content[name.lower()] = {"_target_": f"{FAULTS}.{name}"} | settings.get(name, {})
    path.write_text(yaml.safe_dump(content))
    return [f"allow_targets=[{FAULTS}]", "callbacks=[default,fault]"]


def send_signals(folder: Path, *events: tuple[str, int, str]) -> list[str]:
    """Return options of a run that receives these signals: (hook, steps taken, signal)."""
    settings = {"events": [list(event) for event in events], "sent": str(folder / "sent")}
    return add_faults(folder, "SendSignals", SendSignals=settings)


def read_report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def read_checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def read_weights(path: Path) -> dict[str, Tensor]:
    return read_checkpoint(path)["state_dict"]


def read_step(path: Path) -> int:
    return read_checkpoint(path)["global_step"]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Compare two networks bit for bit."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def read_events(folder: Path) -> EventAccumulator:
    """Read what TensorBoard shows of a run."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return events.Reload()


def read_steps(folder: Path, tag: str) -> list[int]:
    """Return the steps at which TensorBoard has a value."""
    return [event.step for event in read_events(folder).Scalars(tag)]


def read_curve(folder: Path, name: str) -> list[tuple[int, str]]:
    """Return a column of metrics.csv where it is not empty, with the steps."""
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(int(row["step"]), row[name]) for row in rows if row[name]]
