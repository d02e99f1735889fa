"""Hydra's entry: compose a command's config, run it once or per job, and say errors in a line."""

import atexit
import gc
import os
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # Hydra 1.3.8; the only list of its flags
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from unet3d.config.compose import (
    describe_composition,
    find_user_config_dirs,
    get_config_dir,
    list_config_groups,
    protect_overrides,
    quote,
)
from unet3d.config.keys import CONFIG_ERRORS, check_config, format_command_help, format_config_error
from unet3d.data.case import InvalidDatasetError
from unet3d.errors import (
    ADVICE,
    DoesNotFitError,
    EstimatedOutOfMemoryError,
    Interrupted,
    RunError,
    UsageError,
    describe_os_error,
    is_out_of_memory,
    summarize_error,
)
from unet3d.files import is_unread, write_output

PATH_ERRORS = (
    *(FileNotFoundError, FileExistsError, PermissionError),
    *(NotADirectoryError, IsADirectoryError),
)


def run_app(command: str, args: Sequence[str]) -> int:
    """Compose the config of `command` and run it, once or for each job of a sweep."""
    jobs, own = _Jobs(command), sys.argv
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and we print the message
    with report_errors(command, args, debug="debug=true" in args) as outcome:
        flags = parse_flags(command, args)
        jobs.sweeping = flags.multirun
        # Hydra reads these; the first word is the program whose words it completes.
        program = "unet3d" if flags.shell_completion else f"unet3d {command}"
        sys.argv = [program, *translate_arguments(command, args, flags)]
        folder = str(get_config_dir())
        try:
            hydra.main(version_base="1.3", config_path=folder, config_name=command)(jobs.run)()
        except UsageError:
            raise
        except (TypeError, ValueError) as error:  # such as flags that need another one
            raise UsageError(f"Hydra cannot run this: {summarize_error(error)}") from error
        finally:
            sys.argv = own
    if jobs.sweeping and jobs.codes:
        succeeded = len(jobs.codes) - len(jobs.exceptions)
        print("\n".join([f"\nsweep: {succeeded} of {len(jobs.codes)} done", *jobs.exceptions]))
    for folder in jobs.sweep_folders:
        import_command("compare").print_sweep_summary(folder)
    if outcome.code or not any(jobs.codes):
        return outcome.code
    return jobs.codes[0] if len(jobs.codes) == 1 else 1


def print_help(command: str, about: str, args: Sequence[str]) -> int:
    """Print the help for the config that the arguments make, or for groups that they name."""
    groups = list_config_groups()
    topics = [word for word in args if word in (*groups, "all")]
    with report_errors(command, args) as outcome:
        flags = parse_flags(command, [word for word in args if word not in topics])
        for word in flags.overrides:
            if "=" not in word and not word.startswith("~"):
                near = ", ".join(get_close_matches(word, groups, n=len(groups), cutoff=0))
                raise UsageError(f"no config group {word!r}: name one of {near}, or all")
        overrides = translate(command, flags.overrides, sweeping=False)
        folders = find_user_config_dirs(flags.config_dir)
        write_output(format_command_help(command, about, overrides, folders, topics), None)
    return outcome.code


def parse_flags(command: str, args: Sequence[str]) -> Namespace:
    """Separate the flags of Hydra from overrides, wherever they are; refuse unknown flags."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UsageError(
            f"{message}: settings are written key=value (unet3d {command} --help lists them)"
        )

    parser.error = refuse
    return parser.parse_intermixed_args(list(args))


def translate(command: str, words: Sequence[str], *, sweeping: bool) -> list[str]:
    """Return overrides for Hydra: with its key for the folder of a run, of a sweep or of a search.

    >>> translate("train", ["pool=median", "output=outputs/a (1)"], sweeping=False)
    ['pool=median', "hydra.run.dir='outputs/a (1)'"]
    """
    if command in ("train", "search"):
        if "output=" in words:
            raise UsageError("output= names no folder")
        key = "hydra.sweep.dir=" if sweeping else "hydra.run.dir="
        words = [re.sub("^output=", key, word) for word in words]
    return protect_overrides(words, sweep=sweeping)


def collect_files(command: str, words: Sequence[str]) -> list[str]:
    """Turn words without a key into the keys of `compare` and `view` that they stand for.

    >>> collect_files("compare", ["a", "b c", "format=json"])
    ['format=json', "runs=['a','b c']"]
    >>> collect_files("view", ["image.nii.gz", "a.nii.gz"])
    ["image='image.nii.gz'", "labels=['a.nii.gz']"]
    """
    # Path.exists raises an error if a word is too long for a name.
    files = [word for word in words if "=" not in word or os.path.exists(word)]  # noqa: PTH110
    if not files or command not in ("compare", "view"):
        return list(words)
    quoted = [quote(name) for name in files]
    others = [word for word in words if word not in files]
    if command == "compare":
        return [*others, f"runs=[{','.join(quoted)}]"]
    labels = [f"labels=[{','.join(quoted[1:])}]"] if len(quoted) > 1 else []
    return [*others, f"image={quoted[0]}", *labels]


def translate_arguments(command: str, args: Sequence[str], flags: Namespace) -> list[str]:
    """Return arguments as Hydra reads them: flags first, and overrides of its own keys, quoted."""
    words = collect_files(command, flags.overrides)
    if any(word.lstrip("+").startswith("experiment=") and ".json" in word for word in words):
        from unet3d.nnunet.plans import expand_plans  # imports torch

        words = expand_plans(words, partial(print, file=sys.stderr))
    config_dirs = [] if flags.config_dir is not None else find_user_config_dirs(None)[:1]
    return [
        *(f"--config-dir={folder}" for folder in config_dirs),
        *(arg for arg in args if arg not in flags.overrides),
        *translate(command, words, sweeping=flags.multirun),
    ]


class _Jobs:
    """The jobs that Hydra starts: one, or those of a sweep."""

    def __init__(self, command: str):
        self.command = command
        self.sweeping = False
        self.process = os.getpid()
        self.sweep_folders: set[Path] = set()
        self.codes: list[int] = []
        self.exceptions: list[str] = []  # jobs of a sweep that did not simply succeed

    def run(self, config: DictConfig) -> None:
        """Run one job; Hydra calls this with its config."""
        own: Any = HydraConfig.get()
        overrides: Any = OmegaConf.to_container(own.overrides.task, resolve=False)
        typed, folder = " ".join(overrides), Path(own.runtime.output_dir)
        sweeping, debug = self.sweeping, bool(config.get("debug"))
        if sweeping:
            self.sweep_folders.add(Path(own.sweep.dir).absolute())
        try:
            with report_errors(self.command, (), debug=debug, sweeping=sweeping) as outcome:
                composed = describe_composition(
                    self.command, config, own, overrides, sweeping=sweeping
                )
                check_config(composed)
                module = import_command(self.command)
                accelerator = str(OmegaConf.select(config, "trainer.accelerator"))
                if accelerator.startswith("cuda:"):
                    import_module("unet3d.machine").select_gpu(accelerator)
                outcome.code = module.main(composed, folder)
        except (Interrupted, KeyboardInterrupt):
            self.codes.append(130)
            self.exceptions.append(
                f"{folder.name} interrupted, resume with the same command and resume=auto: {typed}"
            )
            raise
        code = outcome.code
        if isinstance(outcome.error, EstimatedOutOfMemoryError):
            self.exceptions.append(f"{folder.name} skipped: {outcome.error}: {typed}")
        elif code:
            self.exceptions.append(f"{folder.name} failed with exit code {code}: {typed}")
        self.codes.append(code)
        if code and os.getpid() != self.process:  # a launcher process returns only exceptions
            raise RunError(f"job {own.job.num} of the sweep failed with exit code {code}: {folder}")


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


@dataclass
class Outcome:
    """The exit code of a command, and the error that ended it."""

    code: int = 0
    error: BaseException | None = None


@contextmanager
def report_errors(
    command: str, args: Sequence[str], *, debug: bool = False, sweeping: bool = False
) -> Generator[Outcome]:
    """Print an error of the body as one line, unless nobody reads what is printed, as in `| head`.

    Interrupting one job of a sweep interrupts the sweep; a job that is estimated not to fit is
    skipped.
    """
    outcome = Outcome()
    try:
        yield outcome
        sys.stdout.flush()
    except EstimatedOutOfMemoryError as error:
        print(f"skipped: {error}")
        outcome.error = error
    except (Interrupted, KeyboardInterrupt) as error:
        if sweeping:
            raise
        if not (isinstance(error, Interrupted) and error.is_reported):
            print(f"unet3d: interrupted by {error or 'SIGINT'}", file=sys.stderr)
        outcome.code = error.exit_code if isinstance(error, Interrupted) else 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            outcome.code = 141  # as a shell has it for tools that SIGPIPE ends
            return
        if debug:
            traceback.print_exception(error)
        print(f"unet3d: {format_error(error, command, args)}", file=sys.stderr)
        outcome.code, outcome.error = get_exit_code(error), error


def get_exit_code(error: Exception) -> int:
    """Return 2 for usage errors, 3 for out of memory, 4 for other errors."""
    if isinstance(error, (UsageError, *CONFIG_ERRORS, *PATH_ERRORS)):
        return 2
    return 3 if isinstance(error, DoesNotFitError) or is_out_of_memory(error) else 4


def format_error(error: Exception, command: str, args: Sequence[str]) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, CONFIG_ERRORS):
        return format_config_error(error, command, args)
    if isinstance(error, DoesNotFitError | InvalidDatasetError):
        return str(error)  # a report of several lines
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UsageError | RunError):
        return text
    if isinstance(error, OSError) and (error.filename is not None or error.errno in ADVICE):
        return describe_os_error(error)
    if is_out_of_memory(error):
        return (
            f"out of memory: {text}: make data.patch_size, data.batch_size, the network (model.*) "
            "or the scan smaller"
        )
    return f"{type(error).__name__}: {text} (debug=true shows the traceback)"


@contextmanager
def show_progress(unit: str) -> Generator[Callable[[int, int], None]]:
    """Yield a function of what is done and the total; a terminal shows them as a progress bar."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", unit_scale=True, disable=None, leave=False) as bar:

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move
