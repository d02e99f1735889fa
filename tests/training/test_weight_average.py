"""The exponential moving average of the weights."""

import pytest
import torch
from torch import nn

from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.inference.ensemble import load_ensemble
from unet3d.model.weights import WeightAverage


def make_network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)).to(dtype)


def randomize(network):
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.copy_(10 * torch.rand(tensor.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_all_weights_with_a_growing_decay(dtype):
    network = make_network(dtype)
    average = WeightAverage(network, decay=0.3)
    expected = {name: w.double() for name, w in network.state_dict().items()}
    for decay in (1 / 10, 2 / 11, 3 / 12, 0.3, 0.3):
        randomize(network)
        average.update()
        for name, weight in network.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * weight.double()
    del expected["1.num_batches_tracked"]
    assert average.values.keys() == expected.keys()
    for name, value in average.values.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_a_run_validates_and_predicts_with_the_average(composed, tmp_path):
    run = build_training(composed("ema_decay=0.9", "trainer.max_steps=4"), tmp_path)
    validated = []

    def record(network, *_):
        if not network.training:
            validated.append(network.heads[0].weight.detach().clone())

    run.module.model.register_forward_hook(record)
    run.trainer.fit(run.module, run.data)
    last = tmp_path / "checkpoints" / "last.ckpt"
    trained = run.module.model.heads[0].weight
    content = load_checkpoint(last)
    assert not trained.equal(validated[-1])
    assert content["state_dict"]["model.heads.0.weight"].equal(validated[-1])
    assert content["trained_weights"]["model.heads.0.weight"].equal(trained)
    network = load_ensemble([last]).networks[0]
    assert network.heads[0].weight.equal(validated[-1])
