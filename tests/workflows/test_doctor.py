import json
from types import SimpleNamespace

import pytest
import torch

from unet3d.cli import doctor as shown
from unet3d.cli.main import main
from unet3d.machine import preflight as machine
from unet3d.units import GIB
from unet3d.workflows.doctor import inspect_machine, inspect_run
from unet3d.workflows.memory import oom_advice


@pytest.fixture
def gpu(driver, monkeypatch):
    """Torch as it is on a machine with one GPU; the driver is made up."""
    driver("new")
    properties = SimpleNamespace(uuid="aaaa", name="NVIDIA Made Up", total_memory=80 * GIB)
    there = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _: properties,
        "get_device_name": lambda: "NVIDIA Made Up",
        "get_device_capability": lambda: (9, 0),
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "is_bf16_supported": lambda **_: True,
    }
    for name, answer in there.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    # A torch that is built for CUDA would go on to ask a driver which stream it computes on.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def examined(composed, tmp_path):
    def doctor(*words: str):
        request = composed(*words, base=[])
        here = inspect_machine(request, tmp_path)
        return here, *inspect_run(request, tmp_path, here)

    return doctor


def test_a_gpus_largest_batch_counts_what_others_hold(examined, gpu):
    here, job, limits = examined("precision=16")
    (one, part) = here.gpus
    assert (one.number, one.capability, one.utilisation, part.number) == (0, (9, 0), 87, None)
    assert [p.pid for p in one.others] == [4242, 77]
    assert (job.device, job.precision.used) == ("cuda", "16")
    assert job.room == 60 * GIB
    assert job.largest_batch > 100 * job.batch
    (held,) = [lack.what for lack in limits if "held" in lack.what]
    assert "20.0 GiB of GPU 0's 80.0 GiB are held by /usr/bin/viewer (4242, 16.0 GiB)" in held
    assert "60.0 GiB are left" in held
    assert not [lack for lack in limits if lack.stop]
    said = shown.format_doctor_report(here, job, limits)
    assert "GPU 0             NVIDIA Made Up, 60.0 GiB of 80.0 GiB free, sm_90, busy 87 %" in said
    assert "580.65.06, runs CUDA 13.1 at most" in said
    assert "torch does not use it" in said


def test_what_does_not_fit_is_told_with_what_would(examined, gpu, monkeypatch):
    # Of all changes that may help one is tried: each is a prediction.
    monkeypatch.setattr(
        oom_advice, "list_candidate_overrides", lambda request: [("data.batch_size=HALF",)]
    )
    _, job, limits = examined("data.batch_size=8000", "memory.if_too_large=stop")
    assert limits[0].stop
    assert "predicted not to fit" in limits[0].what
    assert "predicted to fit:\n  data.batch_size=4000" in limits[0].what
    assert 4000 <= job.largest_batch < job.batch


def test_a_run_without_a_gpu_says_so_and_that_half_precision_is_another(examined):
    _, job, limits = examined("precision=16", "trainer.accelerator=cpu")
    said = [lack.what for lack in limits]
    assert [what for what in said if what.startswith("trainer.accelerator=cpu: training takes")]
    assert [what for what in said if what.startswith("precision=16 is computed as")]
    assert job.largest_batch is None
    assert 0 < job.peak < GIB


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=decathlon", "data.root=/no/such"], "no dataset.json in /no/such"),
        (["precision=16-true", "trainer.accelerator=cpu"], "needs a GPU"),
        (["trainer=torchrun"], "processes that torchrun starts"),
        (["model=dynunet", "pool=median"], "has its own pooling"),
    ],
)
def test_what_would_stop_the_run_comes_first_and_the_rest_is_still_told(examined, words, said):
    here, job, limits = examined(*words)
    assert limits[0].stop
    assert said in limits[0].what
    assert "STOPS IT: " in shown.format_doctor_report(here, job, limits)


def test_a_small_dev_shm_ends_the_doctor_with_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "get_free_shm", lambda: 4096)
    assert main(["doctor", "data.num_workers=2", "format=json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["limits"][0]["stop"]
    assert "--shm-size=1g" in found["limits"][0]["what"]
    assert found["software"]["torch"] == torch.__version__
    assert found["run"]["batch"] == 4
    assert not list(tmp_path.iterdir())  # nothing is made, neither data nor a run


def test_a_doctor_writes_a_file_when_asked_and_nothing_stops_the_default_job(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "output=report.txt"]) == 0
    assert "what limits it" in (tmp_path / "report.txt").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.txt"]
    assert main(["doctor", "format=yaml"]) == 2


def test_one_of_several_processes_is_told_which_trainer_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for key, value in ({"TORCHELASTIC_RUN_ID": "none"} | ranks).items():
        monkeypatch.setenv(key, value)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "started by        torchrun, rank 1 of 2" in said
    assert "STOPS IT: torchrun started 2 processes, which would each train alone" in said
    assert main(["doctor", "trainer=torchrun"]) == 0
