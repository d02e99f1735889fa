import gc

import pytest
import torch

from unet3d.memory.from_config import estimate_memory
from unet3d.memory.step.build import build_network
from unet3d.memory.step.measure import measure_step, record_layers


def test_a_real_step_has_the_rows_of_the_estimate(composed):
    """There is no allocator to read on a CPU: the reader counts its calls."""
    request = composed("model=unet_small", "model.width=2", "data.batch_size=2")
    calls = []

    def read():
        calls.append(1)
        return len(calls), 0

    model = build_network(request.step)
    with record_layers(model, read) as layers:
        model(torch.randn(2, 1, 16, 16, 16)).sum().backward()
    estimated = estimate_memory(request.step).layers
    for phase in ("forward", "backward"):
        rows = [[(r.name, r.type) for r in rs if r.phase == phase] for rs in (layers, estimated)]
        assert rows[0] == rows[1]
    assert all(layer.change > 0 for layer in layers)


@pytest.mark.gpu
def test_the_estimate_is_near_the_measurement_on_a_gpu(composed):
    request = composed("trainer.accelerator=gpu", "data.patch_size=[64,64,64]")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    real, estimated = measure_step(request.step), estimate_memory(request.step)
    assert estimated.peak.allocated == pytest.approx(real.peak.allocated - before, rel=0.05)
    assert len(real.layers) >= 10
