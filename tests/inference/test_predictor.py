"""A scan is segmented within the memory that it may take."""

from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch

from tests.inference.conftest import build_predictor, make_ensemble
from unet3d.data.formats.volumes import read_header
from unet3d.errors import DoesNotFitError
from unet3d.inference import predictor as predictor_module
from unet3d.inference.networks import ReplayedNetwork


@pytest.fixture
def task(write_scans):
    return write_scans()[0]


def predict(predictor, prepared):
    """Segment a scan; return the labels that were written."""
    predictor.compute(prepared)()
    return np.asarray(nibabel.load(prepared.task.labels).dataobj)


def test_a_shortfall_of_memory_comes_with_what_to_do(predictor, task, monkeypatch):
    scan = predictor.read(task)
    with monkeypatch.context() as patch:
        patch.setattr(predictor_module, "get_available_bytes", lambda device: 2**20)
        with pytest.raises(DoesNotFitError, match=r"^preprocessing needs .* 1 MiB are available: "):
            predictor.prepare(task)
        unknown = replace(read_header(task.scan.files[0]), assumption="no voxel spacing")
        patch.setattr(predictor_module, "read_header", lambda file: unknown)
        with pytest.raises(
            DoesNotFitError, match=r"^the scan has no voxel spacing: pre.*: write its v"
        ):
            predictor.prepare(task)
        with pytest.raises(DoesNotFitError, match=r"^needs at least .* available: close other pro"):
            predictor.plan(task, scan)
    predictor.device, predictor.window_bytes = torch.device("cuda"), 2**30
    monkeypatch.setattr(predictor_module, "get_free_bytes", lambda device: 2**20)
    with pytest.raises(DoesNotFitError, match=r"^its windows need .* on the GPU, .* batch_size=1"):
        predictor.plan(task, scan)


@pytest.mark.parametrize(("size", "share"), [(1, None), (3, "30%")])
def test_a_scan_that_loses_much_of_a_class_to_postprocessing_is_named(
    tmp_path, caplog, size, share
):
    network = torch.nn.Conv3d(1, 3, 1)
    network.load_state_dict(
        {"weight": torch.tensor([0.0, 1, 0]).view(3, 1, 1, 1, 1), "bias": torch.zeros(3)}
    )
    predictor = build_predictor(make_ensemble(network), keep_largest_component=["a"])
    assert str(predictor).endswith("; classes background, a, b; the largest component alone of a")
    image = np.zeros((16, 16, 16), np.float32)
    image[1:5, 1:5, 1:5] = image[8 : 8 + size, 8 : 8 + size, 8 : 8 + size] = 100
    image[0, 0, 0] = image[-1, -1, -1] = 1  # the box of voxels other than zero
    labels = predictor.segment(predictor.prepare_array(image[None], np.eye(4)))
    assert np.count_nonzero(labels == 1) == 64
    warned = f"the largest component alone is kept, which removed a large part of a ({share}): "
    assert (warned in caplog.text) == bool(caplog.records) == bool(share)


@pytest.mark.gpu
@pytest.mark.parametrize("sums_in_ram", [False, True])
def test_a_gpu_predicts_the_labels_of_a_cpu_by_replaying_windows(ensemble, task, sums_in_ram):
    on_cpu = build_predictor(ensemble)
    expected = predict(on_cpu, on_cpu.prepare(task))
    on_gpu = build_predictor(ensemble, "cuda", batch_size=2)
    assert isinstance(on_gpu.networks[0], ReplayedNetwork)
    prepared = on_gpu.prepare(task)
    assert not prepared.plan.sums_in_ram
    assert prepared.plan.gpu_bytes > 0
    prepared = replace(prepared, plan=replace(prepared.plan, sums_in_ram=sums_in_ram))
    assert (predict(on_gpu, prepared) == expected).mean() > 0.99
