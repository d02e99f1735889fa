import pytest
import torch

from unet3d.infer.sliding import SlidingWindow
from unet3d.types import Misuse


@pytest.mark.parametrize("size", [(20, 17, 9), (5, 6, 7)])
def test_windows_cover_every_voxel_of_any_volume_once(size):
    image = torch.randn(1, 1, *size)
    logits = SlidingWindow([8, 8, 8])(image, lambda x: torch.cat([x, 2 * x], dim=1))
    torch.testing.assert_close(logits, torch.cat([image, 2 * image], dim=1))


@pytest.mark.parametrize("bad", [{"overlap": 1.0}, {"overlap": -0.1}, {"batch_size": 0}])
def test_a_window_that_makes_no_sense_is_refused(bad):
    with pytest.raises(Misuse, match="infer needs"):
        SlidingWindow([8, 8, 8], **bad)
