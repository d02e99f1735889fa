"""Logits that are never in memory as a whole: the same loss and gradients, in less memory."""

import copy
from dataclasses import replace
from functools import partial
from operator import eq

import pytest
import torch
from torch import nn

from tests.contract.helpers.allocated import AllocatedBytes
from unet3d.config.compose import compose_config
from unet3d.config.instantiate import read_option
from unet3d.lazy_logits import LazyLogits, run_network
from unet3d.loss.overlap import DiceCE, GeneralizedDice, Tversky
from unet3d.loss.partial_labels import PartialLabels
from unet3d.loss.skeleton_recall import SkeletonRecall
from unet3d.memory.fit import estimate_configured_step
from unet3d.model.unet import UNet3D
from unet3d.step.training_step import NullListener, RandomBatchStep, build_configured_step
from unet3d.training.config import parse_train_config
from unet3d.training.nonfinite import locate_nonfinite

CLASSES = 9
REGIONS = {"whole": [1, 2], "core": [2, 3], **{str(n): n for n in range(3, CLASSES)}}
LOSSES = {
    "Dice of the batch": DiceCE,
    "Dice of each volume, weights": lambda: DiceCE(
        batch_dice=False, class_weights=[float(n) for n in range(CLASSES)]
    ),
    "focal": lambda: DiceCE(voxel_loss="focal"),
    "topk": lambda: DiceCE(voxel_loss="topk"),
    "smoothing": lambda: DiceCE(label_smoothing=0.1),
    "Tversky": lambda: Tversky(gamma=1.3, ce=0.5),
    "generalized": lambda: GeneralizedDice(ce=1),
    "two sums": SkeletonRecall,
    "partial labels": lambda: PartialLabels(DiceCE(), {200: [3, 4], 201: [5]}),
    "regions": lambda: DiceCE(regions=REGIONS, voxel_loss="focal"),
}


def make_network(classes, strategy="fused", **options):
    torch.manual_seed(0)
    network = UNet3D(
        in_channels=1, num_classes=classes, width=4, depth=4, deep_supervision=True, **options
    )
    read_option("checkpointing", strategy)().apply(network)
    return network


def make_batch(dtype=torch.float64):
    torch.manual_seed(1)
    image = torch.randn(2, 1, 17, 16, 18, dtype=dtype)
    label = torch.randint(0, CLASSES, (2, 17, 16, 18)).to(torch.uint8)
    label[0, :3] = 255  # ignored
    return image, label


def step(network, loss, image, label):
    value = loss(run_network(network, loss, image), label)
    value.backward()
    return value.detach()


@pytest.mark.parametrize("tile_bytes", [3000, 10**9])
@pytest.mark.parametrize("name", LOSSES)
def test_lazy_logits_train_as_plain_modules_do(name, tile_bytes):
    loss = LOSSES[name]().double()
    classes = len(REGIONS) if name == "regions" else CLASSES
    network = make_network(classes, norm="batch").double()
    network.retention = replace(network.retention, tile_bytes=tile_bytes)
    plain = copy.deepcopy(network)
    plain.retention = None
    image, label = make_batch()
    if name == "partial labels":
        label[1, :4], label[1, 5:7] = 200, 201
    outputs = run_network(copy.deepcopy(network), loss, image)
    assert isinstance(outputs[0], LazyLogits)
    networks = (network, plain)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in networks]
    for _ in range(2):
        values = [step(net, loss, image, label) for net in networks]
        torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(network.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", ["heads", "decoder"])
def test_frozen_parts_have_no_gradient_and_the_others_the_same(frozen):
    loss, networks = DiceCE(), []
    for fused in (True, False):
        network = make_network(CLASSES).double()
        if not fused:
            network.retention = None
        getattr(network, frozen).requires_grad_(False)
        step(network, loss, *make_batch())
        networks.append(network)
    for own, other in zip(*(network.parameters() for network in networks), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)


class FixedBatchStep(RandomBatchStep):
    """A step on the same images and labels, whatever network it trains."""

    def make_batch(self, trace, shape):
        generator = torch.Generator().manual_seed(len(self.optimizer.state))
        labels = torch.randint(0, self.loss.num_classes, shape[:1] + shape[2:], generator=generator)
        return torch.randn(shape, generator=generator, dtype=self.dtype), labels.to(torch.int16)


@pytest.mark.parametrize("strategy", ["fused", "lean", "leanest"])
@pytest.mark.parametrize("classes", [2, 118, 1000])
def test_accumulated_clipped_and_averaged_steps_of_any_number_of_classes_equal_plain_modules(
    classes, strategy
):
    network = make_network(classes, strategy).double()
    network.retention = replace(network.retention, tile_bytes=2**16)
    plain, steps = copy.deepcopy(network), []
    plain.retention = None
    for model in (network, plain):
        step = FixedBatchStep(
            model=model,
            loss=DiceCE(),
            sliding_window=None,
            optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            batch_shape=(2, 1, 9, 8, 10),
            volume_shape=(),
            micro_batches=2,
            clip_norm=0.1,
            ema_decay=0.9,
            dtype=torch.float64,
        )
        step.loss.num_classes = classes
        for _ in range(2):
            step.train(NullListener())
        steps.append(step)
    for own, other in (
        *zip(network.state_dict().values(), plain.state_dict().values(), strict=True),
        *zip(*(step.average.values.values() for step in steps), strict=True),
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_a_step_holds_a_fraction_of_its_logits():
    network, loss, (image, label) = make_network(250), DiceCE(), make_batch(torch.float32)
    network.retention = replace(network.retention, tile_bytes=2**13)
    with AllocatedBytes([*network.parameters(), image, label]) as allocated:
        step(network, loss, image, label)
    assert allocated.peak < 250 * image.nbytes / 4


def test_the_estimate_of_a_step_with_many_classes_is_its_real_peak_to_the_byte():
    words = ["data.num_classes=40", "model.width=4", "data.patch_size=[16,16,16]"]
    words += ["data.in_channels=1", "trainer.accelerator=cpu", "model.deep_supervision=true"]
    words += ["model.depth=4"]
    config = parse_train_config(compose_config(words, "train")).step
    estimated = estimate_configured_step(config, validates=False)
    step = build_configured_step(config, torch.device("cpu"))
    with AllocatedBytes([*step.model.parameters(), *step.model.buffers()]) as allocated:
        step.train(NullListener())
        allocated.peak = allocated.current
        step.train(NullListener())
    assert estimated.peak.allocated == allocated.peak


def test_a_head_with_nan_is_named():
    network, image = make_network(CLASSES), make_batch(torch.float32)[0]
    nn.init.constant_(network.heads[0].weight, torch.nan)
    outputs = run_network(network, DiceCE(), image)
    assert "heads.0, whose weights are not finite" in locate_nonfinite(network, image, outputs)


def test_lazy_logits_say_why_they_are_no_tensor():
    logits = make_network(CLASSES)(make_batch(torch.float32)[0], lazy_logits=True)[0]
    with pytest.raises(AttributeError, match=r"^lazy logits have no argmax: .*without lazy_logits"):
        logits.argmax(1)
    for use in (partial(torch.stack, [logits]), partial(eq, logits, 0)):
        with pytest.raises(
            TypeError, match=r"^lazy logits are no argument of .*without lazy_logits"
        ):
            use()


def test_lazy_logits_are_not_read_with_other_weights_than_made_their_activation():
    network, (image, label) = make_network(CLASSES), make_batch(torch.float32)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    logits = run_network(network, DiceCE(), image)
    loss = DiceCE()(logits, label)
    loss.backward()
    assert DiceCE()(logits, label) == loss
    optimizer.step()
    with pytest.raises(RuntimeError, match="read after the weights have changed"):
        DiceCE()(logits, label)


def test_a_second_backward_is_refused():
    network, (image, label) = make_network(CLASSES), make_batch(torch.float32)
    loss = DiceCE()(run_network(network, DiceCE(), image), label)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot run a second"):
        loss.backward()
