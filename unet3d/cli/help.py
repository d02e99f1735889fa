"""`unet3d COMMAND --help`: every option and key with its comment from the config files."""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from unet3d.cli.arguments import find_user_config_dirs, parse_config_dirs, quote_override
from unet3d.cli.error_messages import run_with_error_handling
from unet3d.config.comments import collect_comments, iter_key_values, list_option_help
from unet3d.config.compose import compose_config, get_config_dir, list_config_groups
from unet3d.config.user_configs import check_config_dirs

FOOTER = "--cfg job prints the composed config; debug=true shows tracebacks"

RUN_FOOTER = """hydra.run.dir=FOLDER names the run's folder; -m runs every combination of key=a,b
a folder conf/ in the working folder adds options"""


def print_help(command: str, about: str, words: Sequence[str]) -> int:
    """Print the help for the config that the words make."""

    def compose_and_print() -> int:
        config_dirs = find_user_config_dirs(words)
        check_config_dirs(config_dirs, words)
        named = {str(folder) for folder in parse_config_dirs(words)}
        overrides = [
            quote_override(w, sweep=False) for w in words if w[0] != "-" and w not in named
        ]
        print(format_command_help(command, about, overrides, config_dirs))
        return 0

    return run_with_error_handling(compose_and_print, debug=False, command=command, words=words)


def format_command_help(
    command: str, about: str, overrides: Sequence[str], user_dirs: Sequence[Path]
) -> str:
    """Return options, then keys, as these overrides make them."""
    # Quoted, since a path may contain what Hydra's grammar reads as something else.
    urls = [f"file://{folder.resolve()}".replace("'", "\\'") for folder in user_dirs]
    search = ["hydra.searchpath=[" + ",".join(f"'{url}'" for url in urls) + "]"] if urls else []
    composed = compose_config([*overrides, *search], command)
    choices, config_dirs = composed.composition.choices, [get_config_dir(), *user_dirs]
    comments = collect_comments(composed.composition, config_dirs)
    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    parts = [f"usage: unet3d {command} [key=value ...]", about]
    groups = sorted(group for group in choices if group in list_config_groups())
    if groups:
        rows = [
            row for group in groups for row in list_option_help(group, choices[group], config_dirs)
        ]
        parts.append("options (* = selected)\n" + wrap_two_columns(rows, width))
    own_keys = yaml.safe_load((get_config_dir() / f"{command}.yaml").read_text())
    keys = sorted(
        iter_key_values(composed.config), key=lambda row: row[0].split(".")[0] not in own_keys
    )
    rows = [(f"{key}={value}", comments.get(key, "")) for key, value in keys]
    parts.append("keys (... = required)\n" + wrap_two_columns(rows, width))
    footer = f"{RUN_FOOTER}\n{FOOTER}" if command == "train" else FOOTER
    return "\n\n".join([*parts, footer])


def wrap_two_columns(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Format two columns and wrap the second; a long word gets a line of its own."""
    left = min(max(len(word) for word, _ in rows), 38)
    lines = []
    for word, text in rows:
        wrapped = textwrap.wrap(text, max(width - left - 4, 30)) or [""]
        if len(word) > left:
            lines += [f"  {word}", *(f"  {'':{left}}  {line}" for line in wrapped if line)]
            continue
        lines.append(f"  {word:{left}}  {wrapped[0]}".rstrip())
        lines += [f"  {'':{left}}  {line}" for line in wrapped[1:]]
    return "\n".join(lines)
