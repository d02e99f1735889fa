import pytest
import torch
from monai.inferers.utils import sliding_window_inference

from tests.inference.helpers.allocated import measure_peak_bytes
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.inference.write_labels import RegionsToLabels


@pytest.mark.parametrize("size", [(20, 17, 9), (5, 6, 7), (9, 30, 12)])
@torch.no_grad()
def test_labels_equal_those_of_monais_sliding_window(size):
    image, network = torch.randn(2, 1, *size), torch.nn.Conv3d(1, 3, 3, padding=1)
    labels = SlidingWindow([8, 8, 8], batch_size=3)(image, network)
    logits = sliding_window_inference(image, (8, 8, 8), 1, network, overlap=0.5, mode="gaussian")
    assert labels.dtype == torch.uint8
    assert labels.equal(logits.argmax(1).to(torch.uint8))


def test_logits_become_labels_by_the_given_function():
    image = torch.randn(1, 2, 9, 8, 8)
    labels = SlidingWindow([8, 8, 8], decide=RegionsToLabels([4, 7]))(image, lambda x: x)
    expected = torch.where(image[:, 1] > 0, 7, torch.where(image[:, 0] > 0, 4, 0))
    assert labels.equal(expected.to(torch.uint8))


@torch.no_grad()
def test_the_logits_of_the_whole_volume_are_never_allocated():
    image, network = torch.randn(1, 1, 96, 32, 32), torch.nn.Conv3d(1, 30, 1)
    logits_bytes = 4 * 30 * image.numel()
    peak = measure_peak_bytes(lambda: SlidingWindow([16, 16, 16])(image, network))
    assert peak < 0.4 * logits_bytes
