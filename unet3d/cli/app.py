"""Compose a command's config with Hydra, and run the command once, or once per job of a sweep."""

import atexit
import gc
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d.cli.arguments import check_flags, find_user_config_dirs, parse_config_dirs
from unet3d.cli.error_messages import ErrorHandler
from unet3d.config.compose import (
    ComposedConfig,
    Composition,
    format_records,
    get_config_dir,
    has_current_time,
    quote_override,
    read_choices,
)
from unet3d.config.validate import check_config
from unet3d.errors import (
    EstimatedOutOfMemoryError,
    Interrupted,
    RunError,
    UsageError,
    summarize_error,
)
from unet3d.machine.distributed_env import detect_launcher

INTERRUPTED = -1
"""The code of a job that was interrupted, and the sweep with it."""


def run_app(command: str, args: Sequence[str]) -> int:
    """Compose the config of `command` and run it, once or for each job of a sweep."""
    flags = [arg for arg in args if arg in ("-m", "--multirun")]
    words = [arg for arg in args if arg not in flags]
    config_dirs = find_user_config_dirs(args)
    jobs = _Jobs(command, config_dirs, sweeping=bool(flags))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and we print the message
    argv, handler = sys.argv, ErrorHandler(debug="debug=true" in args, command=command, args=args)
    with handler:
        quoted = [quote_override(word, sweep=bool(flags)) for word in read_plans(words)]
        given = flags + quoted  # argparse wants flags before overrides
        check_flags(command, given)
        if config_dirs and not parse_config_dirs(args):
            given = ["--config-dir", str(config_dirs[0]), *given]
        is_sweep = flags and command == "train"
        folder = str(get_config_dir())
        run_with_hydra = hydra.main(version_base="1.3", config_path=folder, config_name=command)
        with lock_sweep(given, config_dirs) if is_sweep else nullcontext(given) as prepared:
            sys.argv = [f"unet3d {command}", *prepared]
            try:
                run_with_hydra(jobs.run)()  # which reads sys.argv
            except UsageError:
                raise
            except (TypeError, ValueError) as error:  # such as flags that need another one
                raise UsageError(f"Hydra cannot run this: {summarize_error(error)}") from error
    sys.argv = argv
    if flags and jobs.codes:
        jobs.print_summary()
    for folder in jobs.sweep_folders:
        import_command("compare").print_sweep_summary(folder)
    failures = [c for c in [handler.code, *jobs.codes] if c]
    if not failures or INTERRUPTED in jobs.codes:
        return handler.code
    return failures[0] if len(jobs.codes) < 2 else 1


def import_command(command: str) -> ModuleType:
    """Import a command's module without collecting garbage, of which imports make none.

    A run starts a second and a half sooner, and data workers share these pages for longer.
    """
    name = f"unet3d.commands.{command}"
    if name not in sys.modules:
        gc.disable()
        try:
            import_module(name)
        finally:
            gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or Triton's functions are reported as leaks
    return sys.modules[name]


@contextmanager
def lock_sweep(args: Sequence[str], config_dirs: Sequence[Path]) -> Generator[list[str]]:
    """Hold the lock of a sweep's folder; yield the arguments with the folder that it has got."""
    from unet3d.training.run_folder import open_sweep_folder

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

    def __init__(self, command: str, config_dirs: Sequence[Path], *, sweeping: bool):
        self.command, self.config_dirs, self.sweeping = command, config_dirs, sweeping
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
        handler = ErrorHandler(debug=bool(config.get("debug")), sweeping=self.sweeping)
        try:
            with handler:
                self._check(composed, folder_has_time=folder_has_time)
                module = import_command(self.command)
                select_gpu(composed)
                handler.code = module.main(composed, folder)
        except (Interrupted, KeyboardInterrupt):
            self.codes.append(INTERRUPTED)
            self.exceptions.append(
                f"{folder.name} interrupted, resume with the same command and resume=auto: {typed}"
            )
            raise
        code = handler.code
        if isinstance(handler.error, EstimatedOutOfMemoryError):
            self.exceptions.append(f"{folder.name} skipped: {handler.error}: {typed}")
        elif code:
            self.exceptions.append(f"{folder.name} failed with exit code {code}: {typed}")
        self.codes.append(code)
        if code and os.getpid() != self.process:  # a launcher process returns only exceptions
            raise RunError(f"job {own.job.num} of the sweep failed with exit code {code}: {folder}")

    def _check(self, composed: ComposedConfig, *, folder_has_time: bool) -> None:
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


def select_gpu(composed: ComposedConfig) -> None:
    """Make the GPU of trainer.accelerator=cuda:N the one that all of this process uses."""
    accelerator = str((composed.config.get("trainer") or {}).get("accelerator"))
    if accelerator.startswith("cuda:"):
        from unet3d.machine import device  # imports torch

        device.select_gpu(accelerator)
