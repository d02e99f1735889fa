"""Every pooling of conf/pool is called as nn.MaxPool3d is, and gives what it promises."""

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from unet3d.build.objects import conf_folder
from unet3d.pool.approx_median import ApproxMedianPool3d
from unet3d.pool.median import MedianPool3d
from unet3d.types import Misuse

OPTIONS = {p.stem: instantiate(OmegaConf.load(p)) for p in (conf_folder() / "pool").glob("*.yaml")}


@pytest.fixture(params=sorted(OPTIONS))
def pool(request):
    return OPTIONS[request.param]


@pytest.mark.parametrize(
    "arguments",
    [(2,), (2, 2), (2, None, 0), ((1, 2, 2),), ([2, 2, 1],), (3, 2, 1), (3, 3, 0)],
    ids=str,
)
def test_output_sizes_are_those_of_max_pooling(pool, arguments):
    x = torch.randn(2, 3, 9, 8, 7)
    wanted = nn.MaxPool3d(*(tuple(a) if isinstance(a, list) else a for a in arguments))(x)
    assert pool(*arguments)(x).shape == wanted.shape
    names = ("kernel_size", "stride", "padding")
    assert pool(**dict(zip(names, arguments, strict=False)))(x).shape == wanted.shape


@pytest.mark.parametrize("layout", ["channels_last", "strided"])
def test_the_layout_of_the_input_changes_nothing(pool, layout):
    x = torch.randn(2, 3, 6, 8, 10)
    other = (
        x.contiguous(memory_format=torch.channels_last_3d)
        if layout == "channels_last"
        else x.transpose(2, 4).contiguous().transpose(2, 4)
    )
    torch.testing.assert_close(pool(2)(other), pool(2)(x))


def test_gradients_are_right(pool):
    x = torch.randn(1, 2, 4, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool(2), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_has_the_dtype_of_the_input(pool, dtype):
    assert pool(2)(torch.randn(1, 1, 4, 4, 4).to(dtype)).dtype == dtype


@pytest.mark.parametrize("window", [2, (1, 2, 2), 3])
def test_the_median_is_numpys(window):
    x = torch.randn(2, 3, 9, 8, 7).relu()  # ties
    layer = MedianPool3d(window)
    view = x
    for axis, size in enumerate(layer.windows.size):
        view = view.unfold(axis + 2, size, size)
    wanted = np.median(view.flatten(5).numpy(), axis=-1)
    torch.testing.assert_close(layer(x), torch.from_numpy(wanted))


@pytest.mark.parametrize("tau", [0.1, 0.01])
@pytest.mark.parametrize(("window", "bound"), [(2, 0.72), (3, 1.31)])
def test_the_approximation_stays_within_its_bound_ties_included(window, bound, tau):
    x = torch.randn(2, 3, 12, 12, 12).relu()
    error = (ApproxMedianPool3d(window, tau=tau)(x) - MedianPool3d(window)(x)).abs().max()
    assert error <= bound * tau


def test_nan_in_a_window_gives_nan_there_alone():
    x = torch.randn(1, 1, 4, 4, 4)
    x[0, 0, 0, 0, 0] = torch.nan
    y = MedianPool3d(2)(x)
    assert y.isnan().sum() == 1
    assert y[0, 0, 0, 0, 0].isnan()


def test_a_window_larger_than_the_volume_is_refused():
    for name in ("median", "approx_median"):
        with pytest.raises(Misuse, match="larger than the feature map"):
            OPTIONS[name](4)(torch.randn(1, 1, 2, 2, 2))
