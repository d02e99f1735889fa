"""Every option of conf/pool is a PoolFactory: arguments and shapes are those of nn.MaxPool3d."""

from pathlib import Path

import hydra.utils
import pytest
import torch
from omegaconf import OmegaConf

from unet3d.errors import UsageError

FILES = sorted(Path(__file__).parents[2].joinpath("conf/pool").glob("*.yaml"))
OPTIONS = [path for path in FILES if path.stem != "strided"]  # stands for no pooling


@pytest.fixture(params=OPTIONS, ids=lambda path: path.stem)
def factory(request):
    return hydra.utils.instantiate(OmegaConf.load(request.param))


@pytest.mark.parametrize(
    "arguments", [(0,), ((2, 2),), (2, 0), (2, 2, -1), (2, 2, 2), ("2",), (7,)]
)
def test_invalid_arguments_are_an_error_of_one_line(factory, arguments):
    with pytest.raises(UsageError) as caught:
        factory(*arguments)
    assert "\n" not in str(caught.value)


def test_a_window_larger_than_the_volume_is_an_error(factory):
    with pytest.raises(UsageError, match="larger than the feature map"):
        factory(4)(torch.randn(1, 1, 8, 3, 8))


@pytest.mark.parametrize("x", [torch.ones(1, 1, 4, 4, 4, dtype=torch.int32), torch.ones(4, 4, 4)])
def test_an_input_that_is_not_a_batch_of_volumes_is_an_error(factory, x):
    with pytest.raises(UsageError, match=r"\(B, C, D, H, W\)"):
        factory(2)(x)


def test_a_volume_without_a_batch_is_pooled_as_a_batch_of_one(factory):
    x = torch.randn(2, 4, 5, 6)
    assert factory(2)(x).equal(factory(2)(x[None])[0])


def test_strides_of_input_and_gradient_do_not_change_values(factory):
    x = torch.randn(2, 8, 3, 6, 4).transpose(1, 4).requires_grad_()  # (2, 4, 3, 6, 8), strided
    plain = x.detach().contiguous().requires_grad_()
    y, y_plain = factory(2)(x), factory(2)(plain)
    upper = torch.randn(y.shape[::-1]).permute(4, 3, 2, 1, 0)
    (g,) = torch.autograd.grad(y, x, upper)
    (g_plain,) = torch.autograd.grad(y_plain, plain, upper)
    assert torch.equal(y, y_plain)
    assert torch.equal(g, g_plain)
