from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference import postprocess
from unet3d.machine import Precision
from unet3d.memory import peak
from unet3d.workflows.inference import predictor as predictor_module
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask
from unet3d.workflows.inference.window_memory import measure_window_memory


@pytest.fixture
def ensemble():
    return Ensemble(
        networks=(nn.Conv3d(1, 3, 3, padding=1),),
        channels=("MR",),
        classes=("background", "a", "b"),
        regions=None,
        keep_largest_component=(),
        preprocessing=Preprocessing(num_classes=3),
        patch_size=(8, 8, 8),
        precision="32",
    )


def build_predictor(ensemble, device, batch_size=1):
    return Predictor(
        ensemble,
        device=torch.device(device),
        precision=Precision("32", "32"),
        overlap=0.5,
        batch_size=batch_size,
    )


def write_scan(folder, shape):
    """Write a scan of noise; return the task of segmenting it."""
    voxels = np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "in.nii")
    scan = ScanFiles(name="in", files=(folder / "in.nii",))
    return ScanTask(scan=scan, labels=folder / "out.nii", probabilities=None)


@pytest.fixture
def task(tmp_path):
    return write_scan(tmp_path, (20, 12, 9))


def predict(predictor, prepared, log=print):
    """Segment a scan; return the labels that were written."""
    predictor.predict(prepared, on_windows=lambda count: None, log=log)
    return np.asarray(nibabel.load(prepared.task.labels).dataobj)


def test_out_of_gpu_memory_within_a_case_is_retried_with_sums_in_ram(ensemble, task):
    predictor = build_predictor(ensemble, "cpu")
    prepared = predictor.prepare(task)
    expected = predict(predictor, prepared)
    network, calls, messages = predictor.networks[0], [], []

    def run_out_of_memory_once(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return network(batch)

    predictor.networks = [run_out_of_memory_once]
    on_gpu = replace(prepared, plan=replace(prepared.plan, sums_in_ram=False))
    np.testing.assert_array_equal(predict(predictor, on_gpu, messages.append), expected)
    assert len(calls) == 3 + prepared.plan.windows
    assert "in: out of GPU memory; retrying with" in messages[0]
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):  # with sums in RAM there is no second try
        predict(predictor, prepared)


def test_outputs_of_modules_are_counted_where_a_process_cannot_read_its_peak(monkeypatch):
    monkeypatch.setattr(peak, "read_resident_peak", lambda: None)
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU())
    device = torch.device("cpu")
    outputs, nbytes = measure_window_memory([network], [network], (1, 1, 4, 4, 4), device)
    assert outputs == 2
    assert nbytes == 3 * 2 * 4**3 * 4  # of both layers, and of what holds them


def test_what_the_process_held_before_does_not_count_as_the_memory_of_a_window():
    before = peak.read_resident_peak()
    if before is None:
        pytest.skip("needs a process that can reset its peak")
    network = nn.Conv3d(1, 2, 1).requires_grad_(False)
    shape = (1, 1, 64, 64, 64)
    _, nbytes = measure_window_memory([network], [network], shape, torch.device("cpu"))
    assert 0 <= nbytes < before / 2


@pytest.mark.parametrize(
    "network",
    [nn.ModuleList(), nn.Conv3d(2, 3, 1)],
)
def test_a_network_that_does_not_run_is_named(network):
    with pytest.raises(UsageError, match=rf"^{type(network).__name__} cannot take patches of 4x4"):
        measure_window_memory([network], [network], (1, 1, 4, 4, 4), torch.device("cpu"))


def test_memory_for_finding_components_is_part_of_the_estimate(ensemble, tmp_path):
    task, predictor = write_scan(tmp_path, (400, 8, 8)), build_predictor(ensemble, "cpu")
    predictor.window_bytes = 0
    held = predictor.prepare(task).volume.held_bytes
    predictor.largest_component_labels = [1]
    assert predictor.prepare(task).max_ram == held + 400 * 8 * 8 * postprocess.BYTES_PER_VOXEL


def test_a_scan_too_large_to_preprocess_is_refused_before_it_is_read(ensemble, task):
    predictor = build_predictor(ensemble, "cpu")
    predictor.ram = 2**20
    with pytest.raises(DoesNotFitError, match=r"^preprocessing needs .* RAM, 1 MiB are avail"):
        predictor.prepare(task)


@pytest.mark.parametrize(
    ("ram", "advice"), [(2**20, "raise memory_gib"), (None, "close other programs")]
)
def test_a_shortfall_of_ram_comes_with_what_to_do(ensemble, task, monkeypatch, ram, advice):
    monkeypatch.setattr(predictor_module, "get_available_bytes", lambda device: 2**20)
    predictor = build_predictor(ensemble, "cpu")
    predictor.ram = ram
    with pytest.raises(DoesNotFitError, match=rf"needs .* are available: {advice}$"):
        predictor.prepare(task)


@pytest.mark.gpu
@pytest.mark.parametrize("sums_in_ram", [False, True])
def test_a_gpu_predicts_the_labels_of_a_cpu(ensemble, task, sums_in_ram):
    on_cpu = build_predictor(ensemble, "cpu")
    expected = predict(on_cpu, on_cpu.prepare(task))
    on_gpu = build_predictor(ensemble, "cuda", batch_size=2)
    prepared = on_gpu.prepare(task)
    assert not prepared.plan.sums_in_ram
    assert prepared.plan.gpu_bytes > 0
    prepared = replace(prepared, plan=replace(prepared.plan, sums_in_ram=sums_in_ram))
    assert (predict(on_gpu, prepared) == expected).mean() > 0.99
