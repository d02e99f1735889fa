"""Files that earlier releases have written are read, and give the same outputs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import unet3d
from unet3d.checkpoint_file import FORMAT_VERSION, save_checkpoint
from unet3d.errors import UsageError
from unet3d.export import bundle
from unet3d.workflows.inference.ensemble import load_ensemble

RELEASED = sorted((Path(__file__).parent / "released").iterdir())


def test_every_format_version_has_a_file():
    versions = [int(folder.name) for folder in RELEASED]
    assert versions == list(range(1, FORMAT_VERSION + 1))
    assert bundle.FORMAT_VERSION == FORMAT_VERSION


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", ["best.ckpt", "bundle"])
def test_a_released_file_gives_the_logits_that_it_gave(folder, name):
    network = load_ensemble([folder / name]).networks[0]
    logits = network(torch.linspace(-2, 2, 8**3).reshape(1, 1, 8, 8, 8))
    np.testing.assert_allclose(logits, np.load(folder / "logits.npy"), atol=1e-4)
    labels = unet3d.load(folder / name, device="cpu").predict(
        np.ones((9, 8, 7)), spacing_mm=(1,) * 3
    )
    assert labels.shape == (9, 8, 7)


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path):
    content = torch.load(RELEASED[-1] / "best.ckpt", weights_only=True)
    content["unet3d"]["format_version"] = FORMAT_VERSION + 1
    save_checkpoint(content, tmp_path / "later.ckpt")
    with pytest.raises(UsageError, match=rf"has format version {FORMAT_VERSION + 1}, .* upgrade"):
        unet3d.load(tmp_path / "later.ckpt")
