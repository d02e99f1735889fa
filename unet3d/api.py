"""Train and evaluate from Python, as the commands do."""

import io
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from unet3d.commands.train import train as run_training
from unet3d.config.compose import quote, replace_values, to_yaml_literal
from unet3d.config.keys import compose_api_config
from unet3d.errors import UsageError
from unet3d.evaluation.evaluate import EvaluationResult, run_evaluation
from unet3d.evaluation.options import build_evaluation, read_config
from unet3d.machine import select_gpu
from unet3d.nnunet.plans import expand_plans
from unet3d.training.config import parse_train_config
from unet3d.training.launch import read_process_rank
from unet3d.training.machine_checks import count_local_processes
from unet3d.training.run import join_run
from unet3d.training.run_reports import TrainingResult

PathLike = str | Path


def train(
    overrides: Sequence[str] = (),
    *,
    folder: PathLike | None = None,
    config_dir: PathLike | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> TrainingResult:
    """Train a network, as ``unet3d train`` does.

    Ctrl-C and SIGTERM save a checkpoint, and raise :class:`unet3d.errors.Interrupted`.

    Args:
        overrides: settings as on the command line, such as ``["pool=median", "seed=1"]``.
        folder: the run folder, instead of ``output=``.
        config_dir: folder with options of your own; ``conf`` in the working folder by default.
        log: called with every line that the command would print.
    """
    if isinstance(overrides, str):
        raise UsageError(f"overrides must be a list of key=value, got {overrides!r}")
    given = list(overrides)
    if folder is not None:
        given.append(f"hydra.run.dir={quote(str(folder))}")
    if not any(text.startswith("trainer.enable_progress_bar") for text in given):
        given.append("trainer.enable_progress_bar=false")
    if any(".json" in text for text in given if text.startswith("experiment=")):
        given = expand_plans(given, log)
    directory = None if config_dir is None else Path(config_dir).expanduser()
    composed = compose_api_config("train", given, directory)
    settings = parse_train_config(composed)
    select_gpu(settings.step.accelerator)
    process = read_process_rank(settings.trainer.launch)
    if count_local_processes(settings, process) > 1:
        raise UsageError(
            "unet3d.train is one process: for several, run `unet3d train`, or start your script "
            "with torchrun and give trainer=torchrun"
        )
    with (
        keep_global_state(),
        redirect_stdout(LineWriter(log)),
        join_run(settings, composed.composition.folder, process, log=print) as signals,
    ):
        return run_training(settings, composed.composition.folder, signals, process, log=print)


@contextmanager
def keep_global_state() -> Generator[None]:
    """Run the body as a command, and give the caller's state back."""
    numbers, array_numbers = random.getstate(), np.random.get_state()
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    choices = {name: getattr(cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")}
    deterministic = torch.get_deterministic_debug_mode()
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    environment = dict(os.environ)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        warnings.catch_warnings(),
    ):
        try:
            yield
        finally:
            random.setstate(numbers)
            np.random.set_state(array_numbers)
            torch.set_float32_matmul_precision(precision)
            torch.set_deterministic_debug_mode(deterministic)
            lightning.setLevel(level)
            for name, choice in choices.items():
                setattr(cudnn, name, choice)
            for key in os.environ.keys() - environment.keys():
                del os.environ[key]
            os.environ.update(environment)


def evaluate(
    predictions: PathLike | Sequence[PathLike],
    references: PathLike,
    *,
    checkpoint: PathLike | Sequence[PathLike] | None = None,
    output: PathLike | None = None,
    images: PathLike | None = None,
    classes: Sequence[str] | None = None,
    regions: Mapping[str, Sequence[int]] | None = None,
    annotated: Mapping[str, Sequence[str]] | PathLike | None = None,
    group_by: PathLike | None = None,
    ignore_label: int | Sequence[int] | None = None,
    tolerance_mm: float | Mapping[str, float] = 1.0,
    metrics: str | Sequence[str] = (),
    missing_predictions: str = "error",
    draw_worst: int = 5,
    workers: int = 1,
    allow_targets: Sequence[str] = (),
) -> EvaluationResult:
    """Score predictions against references, as ``unet3d evaluate`` does.

    Args:
        predictions: a file, a folder, or several folders.
        references: a file or a folder; files are matched by name.
        checkpoint: checkpoint or run folder that made the predictions, or several; says which cases
            were held out.
        output: folder to write files and figures of the worst cases to; by default none.
        images: file or folder of the images to draw the worst cases on.
        classes: names of the labels, background first; by default from a dataset.json near the
            references, else numbers.
        regions: regions instead of classes, each a union of labels.
        annotated: classes that references annotate, by pattern of case names, or a JSON file.
        group_by: pattern of case names whose first group is the patient, or a .json or .csv file
            of cases and patients: confidence intervals resample patients instead of cases.
        ignore_label: labels of the references whose voxels are not scored.
        tolerance_mm: tolerance of the surface Dice, one for all classes or one each.
        metrics: one more metric, or several, such as ``["cldice", "lesions"]``.
        missing_predictions: what to do about references without a prediction, ``"error"`` or
            ``"skip"``.
        draw_worst: number of worst cases to draw.
        workers: cases that are scored in parallel.
        allow_targets: not needed: metrics may be of any package.
    """
    given = {key: value for key, value in dict(locals()).items() if key != "metrics"}
    values = json.loads(json.dumps(given, default=str))  # as a config holds them: paths are text
    names = [metrics] if isinstance(metrics, str) else metrics
    chosen = [f"metrics=[{','.join(names)}]"] if names else []
    required = ["predictions=null", "references=null", "output=null"]
    composed = compose_api_config("evaluate", [*required, *chosen])
    settings = read_config(replace_values(composed, values))
    words = [f"{k}={to_yaml_literal(v)}" for k, v in values.items() if v is not None and v != []]
    command = replace(composed.composition, overrides=(*words, *chosen)).format_command()
    evaluation = build_evaluation(replace(settings, command=command))
    result = run_evaluation(evaluation, warn=lambda line: warnings.warn(line, stacklevel=4))
    if not result.cases:
        name, reason = next(iter(result.errors.items()))
        raise UsageError(f"no case could be scored; {name}: {reason}")
    return result


class LineWriter(io.TextIOBase):
    """A text stream, to stand for standard output, that calls a function with each line."""

    def __init__(self, log: Callable[[str], None]):
        self._log, self._rest = log, ""
        self._stdout = sys.stdout

    def write(self, text: str) -> int:
        """Pass on the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        with redirect_stdout(self._stdout):  # the function may print
            for line in lines:
                self._log(line)
        return len(text)
