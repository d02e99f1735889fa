"""Find the folders of config files: ours, and the user's."""

from pathlib import Path


def get_config_dir() -> Path:
    """Return the folder of the configs: in the package if installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(p for p in (package / "conf", package.parent / "conf") if p.is_dir())


def find_local_config_dir() -> list[Path]:
    """Return conf/ in the working folder, if it is there and is not ours."""
    local = Path.cwd() / "conf"
    return [local] if local.is_dir() and local != get_config_dir() else []
