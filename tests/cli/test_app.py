import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from unet3d.cli.app import import_command, quote_override
from unet3d.cli.main import main

pytestmark = pytest.mark.slow


def report(tmp_path):
    return json.loads((tmp_path / "run" / "report.json").read_text())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle=unet_tiny", "did you mean model?"),
        ("model=unet_smal", "did you mean unet_small?"),
        ("model.depht=5", "did you mean model.depth?"),
        ("data.bach_size=5", "did you mean data.batch_size?"),
        ("experiment=none_such", "no option experiment=none_such"),
        ("+foo=1", "no key or group 'foo'"),
        ("+model.foo=1", "unexpected keyword argument 'foo'"),
        ("data.root='unbalanced", "quote special characters"),
        ("pool.tau=1", "pool.tau"),
    ],
)
def test_a_mistyped_override_is_an_error_that_suggests_the_nearest_name(
    unet3d, capsys, override, message
):
    assert unet3d(override) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("unet3d: ")
    assert "\n" not in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=0", "data.batch_size must be an int >= 1"),
        ("model.depth=9", "data.patch_size"),
        ("model.pool_kernel=[20,2,2]", "data.patch_size"),
        ("trainer=torchrun", "processes started by torchrun"),
        ("trainer=slurm", "processes started by srun"),
        ("data.patch_size=abc", "data.patch_size must be a list"),
        ("optimizer.lr=abc", "optimizer.lr must be a number"),
        ("data.cache=/proc/x", "/proc/x: No such file"),
        ("precision=16-true", "needs a GPU"),
        ("fold=7", "fold must be 0..4"),
        ("optimizer.lr=-1", "optimizer"),
        ("data.num_classes=3", "_target_"),
        ("data.in_channels=2", "data.in_channels=2"),
        ("data.ignore_label=1", "data.ignore_label"),
        ("data.normalize=[zscore,ct]", "one for each of the 1 channels"),
        ("data.splits=/no/such.json", "data.splits: no file /no/such.json"),
        ("data.regions={a:[7]}", "data.regions.a must be labels of 1..3"),
        (
            "data.regions={a:[1,2],b:[3]}",
            "data.regions.a must have exactly one label that no later",
        ),
        ("model=dynunet pool=median", "model=dynunet does not use pool=: remove it"),
        ("model=naive_small pool=max", "model=naive_small does not use pool=: remove it"),
        ("logger=[csv,pencil]", "no option logger=pencil. Options: csv, mlflow, none, tensorboard"),
        ("model=dynunet checkpointing=lean", "DynUNet has no fused blocks"),
        ("pool=approx_median pool.tau=0", "tau must be greater than 0"),
        ("resume=/no/such.ckpt", "no checkpoint at /no/such.ckpt"),
        ("init_from=/no/such.ckpt", "no checkpoint at /no/such.ckpt"),
        ("data=decathlon data.root=/no/such", "no dataset.json in /no/such"),
    ],
)
def test_an_invalid_value_is_an_error_of_one_line_with_exit_code_2(
    small, tmp_path, monkeypatch, capsys, override, message
):
    monkeypatch.chdir(tmp_path)
    words = override.split()
    base = [w for w in small if not ("data=decathlon" in words and w.startswith("data."))]
    if override == "data.num_classes=3":  # three classes asked for, four in the files
        words = ["data.layout.num_classes=4", "data.num_classes=3"]
        message = "labels must be 0..2"
    assert main(["train", *base, f"hydra.run.dir={tmp_path / 'run'}", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert [line for line in error if message in line]
    assert "Traceback" not in "\n".join(error)


def test_debug_shows_the_traceback(unet3d, capsys):
    assert unet3d("data.batch_size=0", "debug=true") == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_with_exit_code_4(unet3d, capsys, monkeypatch):
    from unet3d.commands import train as fit

    def broken(*_):
        raise RuntimeError("the disk\nis full")

    monkeypatch.setattr(fit, "build_training", broken)
    assert unet3d() == 4
    assert (
        "RuntimeError: the disk is full (debug=true shows the traceback)" in capsys.readouterr().err
    )


def test_out_of_memory_has_exit_code_3(unet3d, monkeypatch):
    from unet3d.commands import train as fit

    def broken(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fit, "build_training", broken)
    assert unet3d() == 3


def test_a_nan_loss_stops_the_run_with_exit_code_4(unet3d, capsys):
    assert unet3d("optimizer.lr=1e30", "trainer.max_steps=20") == 4
    assert "at step" in capsys.readouterr().err


def test_paths_may_contain_spaces_commas_equals_and_parentheses(unet3d, tmp_path, decathlon_folder):
    odd = tmp_path / "my scans, a=b (1) it's"
    odd.symlink_to(decathlon_folder)
    run = tmp_path / "a run, x=y (2)"
    assert (
        main(
            [
                "train",
                "data=decathlon",
                f"data.root={odd}",
                "data.patch_size=[16,16,16]",
                "trainer.max_steps=1",
                f"hydra.run.dir={run}",
            ]
        )
        == 0
    )
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (
        main(
            [
                "train",
                "data=decathlon",
                f"data.root={odd}",
                f"init_from={run}/checkpoints/last.ckpt",
                "data.patch_size=[16,16,16]",
                "trainer.max_steps=1",
            ]
        )
        == 0
    )


def test_a_path_is_quoted_unless_it_is_null_or_quoted_already():
    assert quote_override("resume=null", sweep=False) == "resume=null"
    assert quote_override("resume='a b'", sweep=False) == "resume='a b'"
    assert quote_override("model=unet_tiny", sweep=False) == "model=unet_tiny"
    assert quote_override("data.root=a,b", sweep=True) == "data.root=a,b"


def test_a_conf_folder_in_the_working_folder_adds_options(unet3d, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        "defaults: [unet_tiny, _self_]\nwidth: 3\n"
    )
    assert unet3d("model=mine") == 0
    assert report(tmp_path)["config"]["model"]["width"] == 3


def test_a_sweep_runs_every_job_even_if_one_fails(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "-m", "pool=max,median", "fold=0,9"]
    assert main(["train", *small, *sweep]) == 1
    assert capsys.readouterr().err.count("fold must be 0..4") == 2
    pools = [
        json.loads(path.read_text())["config"]["pool"]["_target_"]
        for path in sorted((tmp_path / "sweep").glob("*/report.json"))
    ]
    assert len(set(pools)) == 2


def test_a_sweep_skips_jobs_estimated_to_run_out_of_memory(small, tmp_path, monkeypatch, capsys):
    from unet3d.workflows.memory import oom_advice

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        oom_advice, "get_available_bytes", lambda device: oom_advice.CUDA_CONTEXT_BYTES + 30 * 2**20
    )
    words = [word for word in small if not word.startswith("memory.estimate")]
    sweep = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "-m", "model.width=2,64"]
    assert main(["train", *words, *sweep]) == 0
    message = capsys.readouterr().out
    assert "sweep: 1 of 2 done" in message
    assert "1 skipped: estimated to need" in message
    assert [p.parent.name for p in (tmp_path / "sweep").glob("*/report.json")] == ["0"]


def test_an_interrupted_sweep_resumes(small, tmp_path, monkeypatch, capsys):
    from unet3d.training.callbacks.step_timing import StepTimer

    monkeypatch.chdir(tmp_path)
    sweep = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "-m", "seed=0,1,2", "resume=auto"]
    words = ["train", *small, "trainer.max_steps=3", *sweep]
    begun, original = [], StepTimer.on_train_batch_end

    def stopped(self, trainer, *rest):
        original(self, trainer, *rest)
        begun.append(trainer.global_step)
        if len(begun) == 4:  # the first step of the second job
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepTimer, "on_train_batch_end", stopped)
    assert main(words) == 143
    assert begun == [1, 2, 3, 1]
    message = capsys.readouterr().out
    assert "sweep: 1 of 2 done" in message
    assert "1 interrupted, resume with the same command and resume=auto: " in message
    assert main(words) == 0
    assert begun[4:] == [2, 3, 1, 2, 3]
    message = capsys.readouterr().out
    assert message.count("this run is already finished") == 1
    assert "sweep: 3 of 3 done" in message


def test_a_sweep_on_another_launcher_reports_a_failed_job(small, tmp_path, monkeypatch, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    sweep = ["-m", "hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(["train", *small, *sweep, "fold=9"]) == 4
    assert "job 0 of the sweep failed with exit code 2" in capsys.readouterr().err


def test_garbage_collection_is_enabled_after_a_command_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "unet3d.commands.check", raising=False)
    import_command("check")
    assert gc.isenabled()


def test_an_unknown_command_suggests_the_nearest_name(capsys):
    assert main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err
