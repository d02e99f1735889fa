"""Benchmarks: examples in docstrings, and the report of a GPU without one."""

import copy
import doctest
from importlib import import_module

import nibabel
import numpy as np
import pytest
import torch

from scripts.bench.quality import JOBS
from scripts.bench.results import ROOT
from scripts.bench.rivals import CheckpointedConvs
from scripts.bench.step import build_ours
from scripts.bench.synthetic_hard import CLASSES
from scripts.gpu import report, rows
from unet3d.config.compose import compose_config
from unet3d.data.dataset import build_layout, resolve_dataset
from unet3d.training.config import parse_train_config

PATHS = [p for p in sorted((ROOT / "scripts").rglob("*.py")) if ">>> " in p.read_text()]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_scripts_are_true(name):
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_a_network_with_checkpoints_between_convolutions_computes_what_its_modules_do():
    plain = build_ours([4, 8, 16], "none", norm="batch").double()
    rival = CheckpointedConvs(copy.deepcopy(plain))
    image = torch.randn(2, 1, 13, 12, 14, dtype=torch.float64)
    for network in (plain, rival):
        network(image).square().mean().backward()
    for own, other in zip(plain.parameters(), rival.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    for own, other in zip(plain.buffers(), rival.buffers(), strict=True):
        torch.testing.assert_close(own, other)


def test_hard_volumes_have_small_structures_decoys_and_a_misleading_channel(tmp_path):
    words = [*JOBS["hard"], f"data.root={tmp_path}", "data.layout.num_cases=3"]
    data = parse_train_config(compose_config(words, "train")).data
    layout = build_layout(data)
    assert resolve_dataset(data, layout).classes == CLASSES
    files = [(case.images[0], case.label) for case in layout.list_cases()]
    images, labels = (
        np.stack([np.asarray(nibabel.load(file).dataobj) for file in part])
        for part in zip(*files, strict=True)
    )
    assert images.shape == (3, 48, 48, 24, 2)
    assert layout.describe().channels == ("structures", "misleading")
    counts = [157286, 4021, 1872, 1020, 874, 537, 190, 88]
    assert np.bincount(labels.ravel()).tolist() == pytest.approx(counts, abs=3)
    means = [0.0078, 0.9975, 0.9267, 1.7072, 1.4714, 0.9123, 1.0549, 2.3601]
    first = [images[..., 0][labels == c].mean() for c in range(8)]
    np.testing.assert_allclose(first, means, atol=2e-3)
    bright = images[..., 0][labels == 0] > 0.9  # decoys, and noise
    assert np.count_nonzero(bright) == pytest.approx(1488, abs=5)
    second = [image[label == 1].mean() for image, label in zip(images[..., 1], labels, strict=True)]
    np.testing.assert_allclose(second, [-0.9457, -0.5951, -0.9175], atol=2e-3)


@pytest.mark.long
def test_a_rehearsal_measures_all_parts_on_a_cpu(tmp_path):
    assert report.main(["--rehearse", "--output", str(tmp_path)]) == 0
    parts = rows.read_parts(tmp_path / "rehearsal.json")
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(
        report.PARTS, "done"
    )
    assert parts["forum"]["rows"]["small, plain modules"]["step_seconds"] > 0
    assert "allocated_error_percent" in next(iter(parts["predict"]["rows"].values()))
    (tuned,) = parts["tuned"]["rows"].items()
    assert tuned[0] == "nnU-Net PlainConvUNet, channels-last"
    assert "predicted" not in tuned[1]
    assert parts["lightning"]["rows"]["fused"]["peak"]
    assert not (report.BENCHMARKS / "rehearsal.json").exists()
