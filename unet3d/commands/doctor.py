"""`unet3d doctor`: inspect this machine, and find what limits the configured run on it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from unet3d import __version__
from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.fields import number, read_settings
from unet3d.doctor.benchmark import describe_machine, list_failures, make_file_name, run_benchmark
from unet3d.doctor.inspect import inspect_machine, inspect_run
from unet3d.files import write_output
from unet3d.machine import resolve_device
from unet3d.text import MIB, format_bytes
from unet3d.training.config import TrainConfig, read_training
from unet3d.training.preflight import Problem

KEYS = ("benchmark", "seconds", "format", "output", "trainer.accelerator")
"""Keys that leave open which job a benchmark measures."""

BENCHMARK_JOB = ("experiment=forum_small", "model=unet_small", "precision=16")
"""What a benchmark measures on a GPU unless another job is given: it fills one."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Which run to check this machine for."""

    training: TrainConfig
    format: Literal["table", "json"]
    output: Path | None
    benchmark: bool
    seconds: Annotated[float, number("above 0")]  # that the benchmark may take


def main(composed: ComposedConfig, folder: Path) -> int:
    """Print the report; return 1 if something would certainly stop the run."""
    settings = read_settings(DoctorConfig, composed.config, training=read_training(composed))
    if settings.benchmark:
        return measure_and_save_benchmark(settings)
    machine = inspect_machine(settings.training, folder)
    run, problems = inspect_run(settings.training, folder, machine)
    content: dict[str, Any] = {"unet3d": __version__, **machine, "run": asdict(run)}
    if settings.format == "json":  # bytes; null if unknown
        content["problems"] = [asdict(problem) for problem in problems]
        write_output(json.dumps(content, indent=1), settings.output)
    else:
        write_output(format_doctor_report(content, problems), settings.output)
    return 1 if any(problem.is_fatal for problem in problems) else 0


def measure_and_save_benchmark(settings: DoctorConfig) -> int:
    """Measure, and write the file; return 1 if something did not run as it should."""
    training = settings.training
    device = resolve_device(training.step.accelerator)
    words = training.composition.overrides
    if device == "cuda" and all(word.partition("=")[0] in KEYS for word in words):
        training = read_training(compose_config(BENCHMARK_JOB, "doctor"))
    machine = describe_machine(torch.device(device))
    file = settings.output or Path(make_file_name(machine))
    result = run_benchmark(
        training.step,
        machine,
        file,
        overrides=training.composition.overrides,
        seconds=settings.seconds,
        log=print,
    )
    if result["skipped"]:
        print(f"no time for {', '.join(result['skipped'])}: raise seconds=")
    print(f"wrote {file}: attach it to an issue to report a problem or a new GPU")
    return 1 if list_failures(result["rows"]) else 0


def format_doctor_report(content: Mapping[str, Any], problems: Sequence[Problem]) -> str:
    """Return the report for people: a section for each entry, and what limits the run."""
    lines = []
    for section, facts in content.items():
        if isinstance(facts, dict):
            rows = [(name, format_fact(fact)) for name, fact in facts.items()]
            lines += [section, *(f"  {name:20} {text}" for name, text in rows)]
        else:
            lines.append(f"{section:22} {format_fact(facts)}")
    found = [("BLOCKER: " if p.is_fatal else "- ") + p.message for p in problems]
    lines.append("problems")
    lines += [f"  {line}" for text in found or ["no problems found"] for line in text.split("\n")]
    return "\n".join(lines)


def format_fact(fact: Any) -> str:
    """Return a fact in a line; large numbers are bytes.

    >>> format_fact({"folder": "/runs", "total": 2**31, "free": None}), format_fact([9, True])
    ('folder /runs, total 2.0 GiB, free -', '9, yes')
    """
    if isinstance(fact, dict):
        return ", ".join(f"{name} {format_fact(part)}" for name, part in fact.items())
    if isinstance(fact, list | tuple):
        return ", ".join(map(format_fact, fact)) or "-"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, int) and fact >= MIB:
        return format_bytes(fact)
    return "-" if fact in (None, "") else str(fact)
