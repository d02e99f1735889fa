"""The exponential moving average of the weights."""

import lightning.pytorch as pl
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


class RecordValidation(pl.Callback):
    """Records the weights of each validation, and those before and after it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.trained = module.model.heads[0].weight.detach().clone()

    def on_validation_batch_end(self, trainer, module, *_):
        self.validated = module.model.heads[0].weight.detach().clone()

    def on_train_epoch_end(self, trainer, module):
        self.seen.append((self.trained, self.validated, module.model.heads[0].weight.detach()))


def test_a_run_validates_and_predicts_with_the_average(composed, tmp_path):
    run = build_training(composed("ema_decay=0.9", "trainer.max_steps=4"), tmp_path)
    recorder = RecordValidation()
    run.trainer.callbacks.append(recorder)
    run.trainer.fit(run.module, run.data)
    trained, validated, after = recorder.seen[-1]
    assert trained.equal(after)
    assert not trained.equal(validated)
    last = tmp_path / "checkpoints" / "last.ckpt"
    content = load_checkpoint(last)
    assert content["state_dict"]["model.heads.0.weight"].equal(validated)
    assert content["trained_weights"]["model.heads.0.weight"].equal(trained)
    network = load_ensemble([last]).networks[0]
    assert network.state_dict()["heads.0.weight"].equal(validated)
