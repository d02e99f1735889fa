"""Compose a command's config with Hydra, and run the command once, or once per job of a sweep."""

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d.cli.arguments import check_flags, find_user_config_dirs, parse_config_dirs
from unet3d.cli.error_messages import run_with_error_handling
from unet3d.config.compose import (
    ComposedConfig,
    Composition,
    format_records,
    get_config_dir,
    has_current_time,
    read_choices,
)
from unet3d.config.overrides import quote_override
from unet3d.config.validate import check_config
from unet3d.errors import (
    EstimatedOutOfMemoryError,
    Interrupted,
    RunError,
    UsageError,
    summarize_error,
)
from unet3d.machine.distributed_env import check_rank_variables, detect_launcher

Command = Callable[[ComposedConfig, Path], int]

INTERRUPTED = -1
"""The code of a job that was interrupted, and the sweep with it."""


def run_app(
    command: str,
    run_command: Command,
    args: Sequence[str],
    on_sweep_end: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Compose the config of `command` and call `run_command`, for each job of a sweep.

    `on_sweep_end` is called with the folder of a sweep when all of its jobs have ended.
    """
    flags = [arg for arg in args if arg in ("-m", "--multirun")]
    words = [arg for arg in args if arg not in flags]
    config_dirs = find_user_config_dirs(args)
    jobs = _Jobs(command, run_command, config_dirs, sweeping=bool(flags))

    def compose_and_run() -> int:
        quoted = [quote_override(word, sweep=bool(flags)) for word in read_plans(words)]
        given = flags + quoted  # argparse wants flags before overrides
        check_flags(command, given)
        if config_dirs and not parse_config_dirs(args):
            given = ["--config-dir", str(config_dirs[0]), *given]
        is_sweep = flags and command == "train"
        with lock_sweep(given, config_dirs) if is_sweep else nullcontext(given) as prepared:
            sys.argv = [f"unet3d {command}", *prepared]
            run_with_hydra(command, jobs.run)
        return 0

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and we print the message
    argv, debug = sys.argv, "debug=true" in args
    try:
        code = run_with_error_handling(compose_and_run, debug=debug, command=command, args=args)
    finally:
        sys.argv = argv
    if flags and jobs.codes:
        jobs.print_summary()
    for folder in jobs.sweep_folders:
        on_sweep_end(folder)
    failures = [c for c in [code, *jobs.codes] if c]
    if not failures or INTERRUPTED in jobs.codes:
        return code
    return failures[0] if len(jobs.codes) < 2 else 1


def run_with_hydra(command: str, run_job: Callable[[DictConfig], None]) -> None:
    """Let Hydra read sys.argv and run the jobs; what is wrong in a job, the job says itself."""
    main = hydra.main(version_base="1.3", config_path=str(get_config_dir()), config_name=command)
    try:
        main(run_job)()
    except UsageError:
        raise
    except (TypeError, ValueError) as error:  # such as flags that need another one
        raise UsageError(f"Hydra cannot run this: {summarize_error(error)}") from error


@contextmanager
def lock_sweep(args: Sequence[str], config_dirs: Sequence[Path]) -> Generator[list[str]]:
    """Hold the lock of a sweep's folder; yield the arguments with the folder that it has got."""
    from unet3d.workflows.shared.run_folder import open_sweep_folder

    words = [arg for arg in args if "=" in arg and not arg.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(words)
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    path = [f"hydra.searchpath=['file://{folder.absolute()}']" for folder in config_dirs]
    with initialize_config_dir(str(get_config_dir()), version_base="1.3"):
        config = compose("train", overrides=[*path, *fixed], return_hydra_config=True)
        own, inputs = config.hydra, select_inputs(config)
        folder, has_time = Path(own.sweep.dir), has_current_time(own, "sweep")
    resumes = "resume='auto'" in args  # as quote_override writes it
    with open_sweep_folder(
        folder, resumes=resumes, has_time=has_time, log=print, inputs=inputs
    ) as found:
        name = quote_override(f"hydra.sweep.dir={found}", sweep=True)
        yield [*args, name] if has_time else [*args]


def select_inputs(config: DictConfig) -> dict[str, Path | None]:
    """Return the files and folders that all jobs of a sweep read, by key."""
    from unet3d.config.settings.training import INPUT_KEYS
    from unet3d.config.values import read

    inputs: dict[str, Path | None] = {}
    for key in INPUT_KEYS:
        with suppress(OmegaConfBaseException):  # what is wrong in a job, the job says itself
            value = read(config, key)
            inputs[key] = Path(value) if isinstance(value, str) else None
    return inputs


def read_plans(args: Sequence[str]) -> Sequence[str]:
    """Replace experiment=nnUNetPlans.json by what the plans say."""
    if not any(arg.lstrip("+").startswith("experiment=") and ".json" in arg for arg in args):
        return args
    from unet3d.workflows.nnunet.plans import expand_plans  # imports torch

    return expand_plans(args, partial(print, file=sys.stderr))


class _Jobs:
    """The jobs that Hydra starts: one, or those of a sweep."""

    def __init__(
        self,
        command: str,
        run_command: Command,
        config_dirs: Sequence[Path],
        *,
        sweeping: bool,
    ):
        self.command, self.run_command = command, run_command
        self.config_dirs, self.sweeping = config_dirs, sweeping
        self.process = os.getpid()
        self.sweep_folders: set[Path] = set()
        self.codes: list[int] = []
        self.exceptions: list[str] = []  # jobs of a sweep that did not simply succeed

    def run(self, config: DictConfig) -> None:
        """Run one job; Hydra calls this with its config."""
        own = HydraConfig.get()
        overrides: Any = OmegaConf.to_container(own.overrides.task, resolve=False)
        typed, folder = " ".join(overrides), Path(own.runtime.output_dir)
        folder_has_time = has_current_time(own, "sweep" if self.sweeping else "run")
        if self.sweeping:
            self.sweep_folders.add(Path(own.sweep.dir).absolute())
        composition = Composition(
            command=self.command,
            choices=read_choices(own.runtime.choices, overrides),
            overrides=tuple(overrides),
            sweeping=self.sweeping,
            folder_has_time=folder_has_time and not self.sweeping,
            records=format_records(config, own) if own.output_subdir is None else {},
        )
        composed = ComposedConfig(config=config, composition=composition)

        def check_and_run() -> int:
            self._check(composed, folder_has_time=folder_has_time)
            try:
                return self.run_command(composed, folder)
            except EstimatedOutOfMemoryError as reason:
                print(f"skipped: {reason}")
                self.exceptions.append(f"{folder.name} skipped: {reason}: {typed}")
                return 0

        try:
            code = run_with_error_handling(
                check_and_run, debug=bool(config.get("debug")), sweeping=self.sweeping
            )
        except (Interrupted, KeyboardInterrupt):
            self.codes.append(INTERRUPTED)
            self.exceptions.append(
                f"{folder.name} interrupted, resume with the same command and resume=auto: {typed}"
            )
            raise
        self.codes.append(code)
        if code:
            self.exceptions.append(f"{folder.name} failed with exit code {code}: {typed}")
        if code and os.getpid() != self.process:  # a launcher process returns only exceptions
            raise RunError(f"job {own.job.num} of the sweep failed with exit code {code}: {folder}")

    def _check(self, composed: ComposedConfig, *, folder_has_time: bool) -> None:
        check_rank_variables()
        launcher = detect_launcher() if self.command == "train" else None
        if launcher is not None and folder_has_time:
            raise UsageError(
                f"{launcher} starts several processes, and each would create its own time-stamped "
                "run folder: set hydra.run.dir=... (and resume=auto to resume after an "
                "interruption)"
            )
        check_config(composed, self.config_dirs)

    def print_summary(self) -> None:
        """Print how many jobs succeeded, and what happened to the others."""
        succeeded = len(self.codes) - len(self.exceptions)
        print("\n".join([f"\nsweep: {succeeded} of {len(self.codes)} done", *self.exceptions]))
