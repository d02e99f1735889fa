from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from unet3d.data.layouts.unlabelled import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.machine.device import Precision
from unet3d.memory import peak
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask
from unet3d.workflows.inference.window_memory import measure_window_memory

CPU = torch.device("cpu")


@pytest.fixture
def predictor():
    return Predictor(
        Ensemble(
            networks=(nn.Conv3d(1, 3, 3, padding=1),),
            channels=("MR",),
            classes=("background", "a", "b"),
            regions=None,
            largest=(),
            preparation=Preprocessing(num_classes=3),
            patch=(8, 8, 8),
            precision="32",
        ),
        device=CPU,
        used=Precision("32", "32"),
        overlap=0.5,
        mirror=(),
        batch_size=1,
        kept=(),
        ram=None,
    )


@pytest.fixture
def task(tmp_path):
    voxels = np.random.default_rng(0).normal(0, 1, (20, 12, 9)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "in.nii")
    scan = ScanFiles(name="in", files=(tmp_path / "in.nii",))
    return ScanTask(scan=scan, labels=tmp_path / "out.nii", probabilities=None)


def predicted(predictor, ready, say=print):
    predictor.predict(ready, told=lambda windows: None, say=say)
    return np.asarray(nibabel.load(ready.task.labels).dataobj)


def test_out_of_gpu_memory_within_a_case_is_answered_by_sums_in_ram(predictor, task):
    ready = predictor.prepare(task)
    expected = predicted(predictor, ready)
    network, calls, said = predictor.networks[0], [], []

    def full_once(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return network(batch)

    predictor.networks = [full_once]
    on_gpu = replace(ready, plan=replace(ready.plan, sums_in_ram=False))
    np.testing.assert_array_equal(predicted(predictor, on_gpu, said.append), expected)
    assert len(calls) == 3 + ready.plan.windows
    assert "in: out of GPU memory; again with" in said[0]
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):  # no second time
        predictor.predict(ready, told=lambda windows: None, say=print)


def test_without_a_peak_of_its_own_a_process_counts_what_modules_give(monkeypatch):
    monkeypatch.setattr(peak, "resident_peak", lambda: None)
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU())
    channels, taken = measure_window_memory([network], [network], (1, 1, 4, 4, 4), CPU)
    assert channels == 2
    assert taken == 3 * 2 * 4**3 * 4  # of both, and of what holds them


@pytest.mark.gpu
@pytest.mark.parametrize("sums_in_ram", [False, True])
def test_a_gpu_gives_the_labels_of_a_cpu(predictor, task, sums_in_ram):
    expected = predicted(predictor, predictor.prepare(task))
    on_gpu = Predictor(
        predictor.members,
        device=torch.device("cuda"),
        used=Precision("32", "32"),
        overlap=0.5,
        mirror=(),
        batch_size=2,
        kept=(),
        ram=None,
    )
    ready = on_gpu.prepare(task)
    assert not ready.plan.sums_in_ram
    assert ready.plan.gpu > 0
    ready = replace(ready, plan=replace(ready.plan, sums_in_ram=sums_in_ram))
    assert (predicted(on_gpu, ready) == expected).mean() > 0.99
