"""Compose a verb's config, run the verb, and answer every error in one line and an exit code."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from errno import EACCES, ENOENT, ENOTDIR, EPERM, EROFS
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from unet3d.config.compose import ComposedConfig, compose_config, get_config_dir, list_config_groups
from unet3d.config.user_configs import check_user_configs
from unet3d.data.findings import InvalidDatasetError
from unet3d.errors import (
    DoesNotFitError,
    Interrupted,
    PredictedOutOfMemoryError,
    RunError,
    UsageError,
)
from unet3d.machine.distributed_env import detect_launcher

PATHS = (
    *("data.root", "data.cache", "data.splits", "data.group_by"),
    *("hydra.run.dir", "hydra.sweep.dir"),
    *(
        "checkpoint",
        "resume",
        "init_from",
        "input",
        "output",
        "predictions",
        "references",
        "images",
    ),
    *("root", "url", "md5", "task", "picture"),
)
"""Keys whose values are paths or a pattern: taken as they are, with spaces, commas, `=` and
parentheses.
"""

WORDS_OR_NUMBERS = ("precision", "fold", "seed", "budget_gib", "trainer.devices", "data.background")
"""Keys that take both, and are checked where they are read."""

STOPPED = -1
"""Of a job that was stopped, and the sweep with it."""

EXIT_CODES: dict[type[BaseException], int] = {UsageError: 2, DoesNotFitError: 3, RunError: 4}


def run_app(
    config: str,
    verb: Callable[[ComposedConfig, Path], int],
    arguments: Sequence[str],
    swept: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Compose `config` with the arguments and call `verb` (once per job of a sweep).

    `swept` is called with a sweep's folder when all of its jobs have ended.
    """
    sweeps: set[Path] = set()
    codes: list[int] = []
    outcomes: list[str] = []  # of a sweep's jobs that were not simply done
    here = os.getpid()
    sweep = [word for word in arguments if word in ("-m", "--multirun")]
    words = [quote_override(word, sweep=bool(sweep)) for word in arguments if word not in sweep]
    words = sweep + words  # argparse wants flags before overrides
    folders = find_user_config_dirs(words)
    if folders and not parse_config_dirs(words):
        words = ["--config-dir", str(folders[0]), *words]

    def job(cfg: DictConfig) -> None:
        own = HydraConfig.get()
        choices, typed = dict(own.runtime.choices), own.overrides.task
        request = ComposedConfig(cfg, choices, typed, config, sweeping=bool(sweep))
        folder = Path(own.runtime.output_dir)
        if sweep:
            sweeps.add(Path(own.sweep.dir).absolute())

        def checked() -> int:
            starter = detect_launcher() if config == "train" else None
            if starter is not None and not {"hydra.run.dir", "hydra.sweep.dir"} & {
                word.split("=")[0] for word in own.overrides.hydra
            }:
                raise UsageError(
                    f"{starter} starts several processes, and each would name the run's folder by "
                    "its own clock: give hydra.run.dir=... (and resume=auto, to go on after a stop)"
                )
            check_unknown_keys(cfg, config)
            check_value_types(request)
            try:
                return verb(request, folder)
            except PredictedOutOfMemoryError as reason:
                print(f"left out: {reason}")
                outcomes.append(f"{folder.name} left out: {reason}: {' '.join(typed)}")
                return 0

        try:
            code = run_with_error_handling(
                checked, debug=bool(cfg.get("debug")), sweeping=bool(sweep)
            )
        except (Interrupted, KeyboardInterrupt):
            codes.append(STOPPED)
            again = "the same line with resume=auto goes on"
            outcomes.append(f"{folder.name} stopped, {again}: {' '.join(typed)}")
            raise
        codes.append(code)
        if code:
            outcomes.append(f"{folder.name} ended with {code}: {' '.join(typed)}")
        if code and os.getpid() != here:  # a launcher has brought the job here, and only this back
            raise RunError(f"job {own.job.num} of the sweep ended with exit code {code}: {folder}")

    def compose_and_run() -> int:
        for folder in {get_config_dir(), *folders}:  # in a checkout people add to ours
            check_user_configs(folder, words)
        hydra.main(version_base="1.3", config_path=str(get_config_dir()), config_name=config)(job)()
        return 0

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and we answer in our words
    before, sys.argv = sys.argv, [f"unet3d {config}", *words]
    try:
        code = run_with_error_handling(
            compose_and_run, debug="debug=true" in words, config=config, words=words
        )
    finally:
        sys.argv = before
    if sweep and codes:
        done = len(codes) - len(outcomes)
        print("\n".join([f"\nsweep: {done} of {len(codes)} done", *outcomes]))
    for folder in sweeps:
        swept(folder)
    failed = [c for c in [code, *codes] if c]
    if not failed or STOPPED in codes:
        return code
    return failed[0] if len(codes) < 2 else 1


def parse_config_dirs(words: Sequence[str]) -> list[Path]:
    """What --config-dir names.

    >>> parse_config_dirs(["--config-dir", "a", "--config-dir=b"])
    [PosixPath('a'), PosixPath('b')]
    """
    flags = ("--config-dir", "-cd")
    apart = [after for word, after in pairwise(words) if word in flags]
    joined = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    return [Path(folder) for folder in (*apart, *joined)]


def find_user_config_dirs(words: Sequence[str]) -> list[Path]:
    """Where options of the user's lie: what --config-dir names, else conf/ where we are."""
    here = Path.cwd() / "conf"
    return parse_config_dirs(words) or (
        [here] if here.is_dir() and here != get_config_dir() else []
    )


def run_with_error_handling(
    action: Callable[[], int],
    *,
    debug: bool,
    config: str = "train",
    words: Sequence[str] = (),
    sweeping: bool = False,
) -> int:
    """Call `action`; an error becomes one line on standard error and an exit code.

    Whoever stops one job of a sweep stops the sweep.
    """
    try:
        return action()
    except (Interrupted, KeyboardInterrupt) as stop:
        if sweeping:
            raise
        if isinstance(stop, Interrupted):
            return stop.exit_code
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"unet3d: {format_error(error, config, words)}", file=sys.stderr)
        return get_exit_code(error)


def get_exit_code(error: Exception) -> int:
    """2 misuse, 3 out of memory, 4 any other fault."""
    if isinstance(error, HydraException | OmegaConfBaseException | YAMLError):
        return 2
    if isinstance(error, OSError) and error.errno in (ENOENT, EACCES, EPERM, ENOTDIR, EROFS):
        return 2  # a path that cannot be
    if is_out_of_memory(error):
        return 3
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 4)


def is_out_of_memory(error: Exception) -> bool:
    """Of a GPU or of the machine, told by name so that torch is not imported for it."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or "can't allocate memory" in str(error)


def format_error(error: Exception, config: str, words: Sequence[str]) -> str:
    """What went wrong, in one line."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = [o for o in error.options if not o.startswith("_")]
        near = _near(option, options)
        return f"no {group}={option}{near} The options are {', '.join(options)}."
    if isinstance(error, ConfigCompositionException):
        match = re.search(r"Could not override '([^']+)'", str(error))
        if match:
            key = match[1]
            return f"no key or group {key!r}{_near(key, list(list_known_keys(config, words, key)))}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key or 'a value'} must be given: {error.full_key}=..."
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: quote special characters, as in key=\"'a, b'\""
    if isinstance(error, DoesNotFitError | InvalidDatasetError):
        return str(error)  # a report of several lines
    if isinstance(error, UsageError | RunError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    if is_out_of_memory(error):
        return f"out of memory: {text}"
    if isinstance(error, HydraException | OmegaConfBaseException | YAMLError):
        return text
    return f"{type(error).__name__}: {text} (debug=true shows where)"


def _near(word: str, known: Sequence[str]) -> str:
    match = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else "."


def list_known_keys(config: str, words: Sequence[str], bad: str) -> Iterator[str]:
    """Every key and group of the config as the other overrides make it."""
    yield from list_config_groups()
    chosen = [
        w for w in words if w.split("=")[0] in list_config_groups() and w.split("=")[0] != bad
    ]
    GlobalHydra.instance().clear()
    try:
        known = compose_config(chosen, config)
    except HydraException:  # another override is wrong as well
        return
    yield from iter_keys(known.config)


def check_unknown_keys(cfg: DictConfig, config: str) -> None:
    """`+key=` may add an option to a group, but no key that nobody reads."""
    known = list_config_groups()
    for name in {"train", config}:
        own = OmegaConf.load(get_config_dir() / f"{name}.yaml")
        assert isinstance(own, DictConfig)
        known += map(str, own)
    for key in map(str, cfg):
        if key not in known:
            raise UsageError(f"no key or group {key!r}{_near(key, known)}")


def check_value_types(request: ComposedConfig) -> None:
    """A value of another kind than the option's default is a slip, wherever it was written.

    So is a key that the option does not have, unless it goes to a `_target_`, which will tell.
    """
    options = {
        g: o for g, o in request.choices.items() if g in list_config_groups() and g != "experiment"
    }
    words = [f"{group}={option or 'null'}" for group, option in options.items()]
    usual = compose_config(words, request.verb).config
    for key in iter_keys(usual):
        given, default = (get_value(c, key) for c in (request.config, usual))
        if key in WORDS_OR_NUMBERS or default is None or isinstance(default, str):
            continue
        if not is_same_kind(given, default):
            like = "a list" if isinstance(default, ListConfig) else type(default).__name__
            like, as_in = ("keys", "") if is_node(default) else (like, f" as in {key}={default}")
            raise UsageError(f"{key} must be {like}{as_in}, got {given!r}")
    for key in iter_keys(request.config):
        node, _, name = key.rpartition(".")
        owner = get_value(usual, node) if node else None
        if isinstance(owner, DictConfig) and not {name, "_target_"} & set(owner):
            raise UsageError(f"no key {key!r}{_near(name, list(map(str, owner)))}")
        value = get_value(request.config, key)
        for number in value if isinstance(value, ListConfig) else [value]:
            if isinstance(number, float) and number != number:
                raise UsageError(f"{key} must be a number, got NaN")


def get_value(cfg: DictConfig, key: str) -> Any:
    """None where there is none, or where it follows another that must still be given."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def is_same_kind(given: Any, default: Any) -> bool:
    """Whether a value may stand where that default is.

    >>> is_same_kind([3, 3, 1], 3), is_same_kind(2, 0.5), is_same_kind(1.5, 1), is_same_kind("large", [8, 8, 8])
    (True, True, False, False)
    """
    if is_node(default) or is_node(given):
        return is_node(default) == is_node(given) or isinstance(default, float)
    if given is None or isinstance(given, ListConfig):
        return True
    if isinstance(given, str) or isinstance(default, ListConfig):
        return False
    if isinstance(given, float) and isinstance(default, int):
        return given.is_integer() and not isinstance(default, bool)
    return isinstance(given, bool) == isinstance(default, bool)


def is_node(value: Any) -> bool:
    """Whether it has keys of its own."""
    return isinstance(value, DictConfig)


def iter_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys with dots.

    >>> list(iter_keys(OmegaConf.create({"a": {"b": 1}})))
    ['a', 'a.b']
    """
    for key in cfg:
        name = f"{prefix}{key}"
        yield name
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from iter_keys(node, f"{name}.")


def write_output(text: str, output: str | None) -> None:
    """To standard output, or into a file."""
    if output is None:
        print(text)
    else:
        Path(output).write_text(text + "\n")


def quote_override(word: str, *, sweep: bool) -> str:
    """Protect a path from Hydra's grammar; in a sweep a comma still separates values.

    >>> quote_override("data.root=/scans/my data (1)", sweep=False)
    "data.root='/scans/my data (1)'"
    """
    key, equals, value = word.partition("=")
    if key.lstrip("+") not in PATHS or not equals or value in ("", "null") or value[0] in "'\"":
        return word
    if sweep and "," in value:
        return word
    escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
    return f"{key}='{escaped}'"
