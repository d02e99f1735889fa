"""The command line: flags and words, errors as one line with an exit code, and sweeps."""

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from unet3d.__main__ import main
from unet3d.app import format_error, get_exit_code, import_command, parse_flags
from unet3d.config.compose import quote_override
from unet3d.errors import UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES


def test_flags_of_hydra_are_accepted_before_and_after_overrides():
    for words in (["seed=1", "--cfg=job", "--resolve"], ["--config-dir", "my configs", "seed=1"]):
        assert parse_flags("train", words).overrides == ["seed=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --lr 0.1", "unrecognized arguments: --lr: settings are written key=value (unet3d "),
        ("train --cfg no", "argument --cfg/-c: invalid choice: 'no'"),
        ("train dropout=0.1", "'dropout': unet3d train --help lists all keys"),
        ("train output=", "output= names no folder"),
        ("train --help modle", "no config group 'modle': name one of model, "),
        ("train strategy=ddp", "no key 'strategy': trainer=ddp uses all GPUs of this machine"),
        (
            "train devices=[0]",
            "'devices': trainer.devices= says how many, and trainer.acc",
        ),
        ("train trainer.devices=[0]", "must be a number of processes, not of a GPU (trainer.acc"),
        (
            "train trainer.devices=0,1",
            "trainer.devices has several values: write trainer.devices=",
        ),
        (
            "train model=segresnet model.width=16",
            "'model.width': in this network it is model.init_filters",
        ),
        (
            "train model=plain_small model.width=16",
            "'model.width': in this network it is model.encoder",
        ),
        ("train trainer.fast_dev_run=true", "'trainer.fast_dev_run': trainer.max_steps=2 runs"),
        (
            "train experiment=none_such",
            "no option experiment=none_such: unet3d plan name=none_such ",
        ),
        ("train +model.foo=1", "unexpected keyword argument 'foo'"),
        ("train data.cache=/proc/x", "/proc/x: No such file"),
        ("train data.regions={a:[1,2],b:[3]}", "a must have exactly one label that no later"),
        ("check data=nnunet", "data.root must be given: data.root=... ("),
        ("doctor trainer=3", "Hydra cannot run this"),
        ("check data.root=scans", "scans: File exists: remove or rename it, or choose another"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").touch()
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("unet3d: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("a\nb"), 4, "RuntimeError: a b (debug=true shows the traceback)"),
        (OSError(errno.EMFILE, "Too many"), 4, "Too many: raise the limit of open files (ulimit"),
        (OSError(errno.ENOSPC, "Full", "a.ckpt"), 4, "a.ckpt: Full: free space or inodes there"),
        (PermissionError(errno.EACCES, "Denied", "a"), 2, "a: Denied: change its permissions"),
        (UsageError("array is too big"), 2, "array is too big"),
        (MemoryError(), 3, "out of memory: MemoryError: make data.patch_size, data.batch_size,"),
        (torch.OutOfMemoryError("CUDA"), 3, "out of memory: CUDA: make data.patch_size"),
    ],
    ids=str,
)
def test_an_error_has_an_exit_code_and_a_line_with_what_to_do(error, code, line):
    assert get_exit_code(error) == code
    assert format_error(error, "train", ()).startswith(line)


def test_a_command_whose_output_nobody_reads_ends_quietly():
    command = f"{sys.executable} -W ignore -m unet3d"
    shell = ["bash", "-c", f"{command} --help | true; {command} train --help | true"]
    ended = subprocess.run(shell, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("count", [1, 99_999], ids=["of a last flush", "of a print"])
def test_a_broken_pipe_is_no_error(count):
    body = f"with report_errors('evaluate', ()) as outcome:\n  for n in range({count}): print(n)"
    code = f"import sys\nfrom unet3d.app import report_errors\n{body}\nsys.exit(outcome.code)"
    piped = f'{sys.executable} -W ignore -c "{code}" | exec true; exit ${{PIPESTATUS[0]}}'
    shell = ["bash", "-c", piped]
    ended = subprocess.run(shell, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    "path",
    ["C:\\scans", "C:\\scans\\", "C:\\it's\\", "\\\\server\\new (1)", "it's, here", "a=b", "nan"],
)
def test_paths_of_any_system_reach_the_config_as_typed(path):
    parsed = OverridesParser.create().parse_override(quote_override(f"input={path}", sweep=False))
    assert parsed.value() == path


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("unet3d pre", {"train", "predict", "compare"}),
        ("unet3d train loss=dice_ce model=unet_s", {"model=unet_small"}),
        ("unet3d train model=dynunet model.fil", {"model.filters."}),
        ("unet3d predict checkpoint=a output_", {"output_format="}),
    ],
)
def test_a_shell_completes_commands_groups_options_and_keys(line, choices, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert choices <= set(capsys.readouterr().out.split())


def test_a_shell_registers_the_program_for_completion(capsys):
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.endswith("-F hydra_bash_completion unet3d\n")


@pytest.fixture
def sweep(small, tmp_path, monkeypatch):
    """Run a sweep of small runs in an empty working folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    return lambda *words, base=small: main(["train", *base, folder, "-m", *words])


@pytest.mark.slow
def test_a_sweep_skips_jobs_estimated_to_run_out_of_memory(
    sweep, small, tmp_path, monkeypatch, capsys
):
    from unet3d.memory import oom_advice

    monkeypatch.setattr(
        oom_advice, "get_available_bytes", lambda device: CUDA_CONTEXT_BYTES + 30 * 2**20
    )
    words = [word for word in small if not word.startswith("memory.estimate")]
    assert sweep("model.width=2,64", base=words) == 0
    message = capsys.readouterr().out
    assert "sweep: 1 of 2 done" in message
    assert "1 skipped: estimated to need" in message
    assert [p.parent.name for p in (tmp_path / "sweep").glob("*/report.json")] == ["0"]


@pytest.mark.slow
def test_an_interrupted_sweep_resumes(sweep, monkeypatch, capsys):
    from unet3d.training.callbacks.step_records import StepTimer

    words = ["trainer.max_steps=3", "seed=0,1,2", "resume=auto"]
    begun, original = [], StepTimer.on_train_batch_end

    def stopped(self, trainer, *rest):
        original(self, trainer, *rest)
        begun.append(trainer.global_step)
        if len(begun) == 4:  # the first step of the second job
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepTimer, "on_train_batch_end", stopped)
    assert sweep(*words) == 143
    assert begun == [1, 2, 3, 1]
    message = capsys.readouterr().out
    assert "sweep: 1 of 2 done" in message
    assert "1 interrupted, resume with the same command and resume=auto: " in message
    assert sweep(*words) == 0
    assert begun[4:] == [2, 3, 1, 2, 3]
    message = capsys.readouterr().out
    assert message.count("this run is already finished") == 1
    assert "sweep: 3 of 3 done" in message


@pytest.mark.slow
def test_a_sweep_on_another_launcher_reports_a_failed_job(sweep, monkeypatch, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert sweep("hydra/launcher=submitit_local", "fold=9") == 4
    assert "job 0 of the sweep failed with exit code 2" in capsys.readouterr().err


def test_one_of_several_processes_needs_a_folder_that_all_of_them_know(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for key, value in ({"TORCHELASTIC_RUN_ID": "none"} | ranks).items():
        monkeypatch.setenv(key, value)
    assert main(["train", "trainer=torchrun"]) == 2
    assert "torchrun starts several processes, and each would create" in capsys.readouterr().err


def test_garbage_collection_is_enabled_after_a_command_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "unet3d.commands.check", raising=False)
    import_command("check")
    assert gc.isenabled()
