import errno
import os

import pytest

from unet3d.cli import error_messages
from unet3d.cli.error_messages import ErrorHandler, format_error, get_exit_code
from unet3d.cli.main import main
from unet3d.errors import UsageError


def test_an_error_of_the_system_without_a_file_names_its_cure():
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert get_exit_code(error) == 4
    message = format_error(error, "train", ())
    assert message == "Too many open files: raise the limit of open files (ulimit -n)"


OF_LIBRARIES = [
    SystemError("error return without exception set"),
    RuntimeError("could not execute a primitive"),
]


@pytest.mark.parametrize("error", [*OF_LIBRARIES, MemoryError()])
def test_where_the_shell_limits_memory_its_limit_is_named(monkeypatch, error):
    limits = ["ulimit -v, now 1 GiB"]
    monkeypatch.setattr(error_messages, "list_memory_limits", lambda: limits)
    assert get_exit_code(error) == 3
    assert "raise ulimit -v, now 1 GiB, or make" in format_error(error, "train", ())


def test_a_thread_that_cannot_start_names_the_limit_of_processes(monkeypatch):
    monkeypatch.setattr(error_messages, "list_memory_limits", list)
    error = RuntimeError("can't start new thread")
    assert get_exit_code(error) == 4
    assert format_error(error, "train", ()).startswith(f"{error}: raise the limit of processes")


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModuleNotFoundError("No module named 'wandb'"), 4), (UsageError("array is too big"), 2)],
)
def test_an_error_with_another_cause_is_none_of_memory_where_it_is_limited(
    monkeypatch, error, code
):
    monkeypatch.setattr(error_messages, "list_memory_limits", lambda: ["ulimit -v, now 1 GiB"])
    assert get_exit_code(error) == code
    assert "out of memory" not in format_error(error, "train", ())


def test_a_broken_pipe_of_anything_but_standard_output_is_an_error(capsys):
    with ErrorHandler(debug=False) as handler:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert handler.code == 4
    assert "Broken pipe" in capsys.readouterr().err


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").touch()
    assert main(["check", "data.root=scans"]) == 2
    line = "unet3d: scans: File exists: remove or rename it, or choose another folder\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", OF_LIBRARIES)
def test_an_error_of_a_library_is_none_of_memory_without_a_limit(monkeypatch, error):
    monkeypatch.setattr(error_messages, "list_memory_limits", list)
    assert get_exit_code(error) == 4


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train lr=0.1", "did you mean optimizer.lr?"),
        ("train modl.width=8", "did you mean model.width?"),
        ("train data.batch=4", "did you mean data.batch_size?"),
        ("memory batch=4", "did you mean data.batch_size or inference.batch_size?"),
        ("train root=scans", "did you mean data.root?"),
        ("train dropout=0.1", "'dropout': unet3d train --help lists all keys"),
    ],
)
def test_a_wrong_key_suggests_the_keys_with_the_same_last_part(capsys, words, hint):
    assert main(words.split()) == 2
    assert capsys.readouterr().err.endswith(f"{hint}\n")


def test_an_experiment_before_its_plan_names_the_command_that_writes_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=planned"]) == 2
    error = capsys.readouterr().err
    assert "unet3d plan name=planned writes conf/experiment/planned.yaml" in error
