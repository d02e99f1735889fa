"""Gradients of poolings do not depend on threads."""

import torch

from unet3d.pool.median import MedianPool3d


def test_backward_with_several_threads_is_deterministic():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(2, 8, 17, 33, 21, requires_grad=True)
    y = MedianPool3d(3, 2, 1)(x)
    upper = torch.randn_like(y)
    first, *others = (torch.autograd.grad(y, x, upper, retain_graph=True)[0] for _ in range(4))
    torch.set_num_threads(before)
    assert all(torch.equal(first, other) for other in others)
