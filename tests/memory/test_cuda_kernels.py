"""Dropout and attention as they run on a GPU: what a step stores of them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import unet3d
from unet3d.memory.fake_tensors import simulate_cuda_step

MIB = 2**20
LENGTH, CHANNELS = 2048, 64


class Attention(nn.Module):
    def __init__(self, *, masked: bool, dropout: float):
        super().__init__()
        self.inputs = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.masked, self.dropout = masked, dropout

    def forward(self, x):
        query, key, value = self.inputs(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool) if self.masked else None
        return F.scaled_dot_product_attention(
            query=query, key=key, value=value, attn_mask=mask, dropout_p=self.dropout
        )


def estimate(make, shape, precision="32", device="cuda"):
    def build():
        network = make()

        def step():
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = network(torch.randn(shape)).float().mean()
            loss.backward()
            network.zero_grad()

        return step

    return unet3d.estimate_step(build, device=device)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("precision", "nbytes"), [("32", 4), ("bf16", 2)])
def test_attention_stores_no_scores(precision, nbytes, dropout):
    make = partial(Attention, masked=False, dropout=dropout)
    estimated = estimate(make, (2, LENGTH, CHANNELS), precision)
    scores = 2 * 4 * LENGTH**2 * nbytes
    blocks = estimated.details.trace.blocks
    assert max(block.nbytes for block in blocks) < scores / 4
    name = "flash" if nbytes == 2 else "efficient"
    assert any(f"product_{name}_attention_backward" in block.op for block in blocks)


def test_attention_with_a_mask_stores_the_mask_and_no_scores():
    make = partial(Attention, masked=True, dropout=0.1)
    estimated = estimate(make, (2, LENGTH, CHANNELS), "bf16")
    masks = [b for b in estimated.details.trace.blocks if b.nbytes >= LENGTH**2 and not b.kind]
    assert max(b.nbytes for b in masks) == 2 * LENGTH**2  # in half precision, for all heads


def test_dropout_stores_a_byte_for_each_element():
    def make():
        return nn.Sequential(nn.Conv3d(1, 8, 1), nn.Dropout(0.5))

    estimated = estimate(make, (1, 1, 64, 64, 64))
    blocks = [b for b in estimated.details.trace.blocks if b.op == "native_dropout"]
    assert [b.nbytes for b in blocks[:2]] == [8 * 64**3 * 4, 8 * 64**3]
    on_cpu = estimate(make, (1, 1, 64, 64, 64), device="cpu")
    assert not any(b.op == "native_dropout" for b in on_cpu.details.trace.blocks)


def test_outputs_have_the_shapes_and_dtypes_of_torch():
    def run(length, channels, dtype, mask):
        query = torch.zeros(2, 4, 6, channels, dtype=dtype)
        key, value = (torch.zeros(2, 4, length, channels, dtype=dtype) for _ in range(2))
        out = F.scaled_dot_product_attention(query, key, value, mask)
        return out.shape, out.dtype

    cases = [
        (length, channels, dtype, mask)
        for length, channels, dtype in ((8, 16, torch.float32), (5, 7, torch.bfloat16))
        for mask in (None, torch.ones(6, length, dtype=torch.bool))
    ]
    real = [run(*case) for case in cases]
    with FakeTensorMode(allow_non_fake_inputs=True), simulate_cuda_step():
        assert [run(*case) for case in cases] == real


def test_what_a_gpu_computes_otherwise_is_left_to_torch():
    with FakeTensorMode(), simulate_cuda_step():
        x = torch.zeros(1, 1, 4, 8, requires_grad=True)
        for p, training in ((0.0, True), (0.5, False)):
            assert F.dropout(x, p, training) is x
        outputs = F.scaled_dot_product_attention(*[x.double()] * 3)
        assert "UnsafeView" in type(outputs.grad_fn).__name__  # of a product with all scores
    x = torch.zeros(1, 1, 4, 8, requires_grad=True)
    with simulate_cuda_step():
        assert "ForCpu" in type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__
