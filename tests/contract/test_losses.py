"""Losses store logits and labels, and a run's first step is that of plain torch."""

import json

import nibabel
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.contract.helpers.components import build, saved_bytes
from tests.contract.helpers.plain import PlainUNet, dice_ce

OWN = {
    "default": (),
    "per volume": ("loss.batch_dice=false",),
    "focal": ("loss.voxel_loss=focal",),
    "worst voxels": ("loss.voxel_loss=topk",),
    "smoothed": ("loss.label_smoothing=0.1",),
    "weighted": ("loss.class_weights=[0.25,1,1,2]",),
    "tversky": ("loss=tversky", "loss.ce=1"),
    "focal_tversky": ("loss=focal_tversky",),
    "generalized_dice": ("loss=generalized_dice",),
}


def make_sample(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 6, 7, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (2, 6, 7, 8), generator=generator).to(torch.uint8)
    return logits.to(dtype).requires_grad_(), labels


def soft_sums(logits, labels, axes=(0, 2, 3, 4)):
    """Return overlap, false positives and false negatives of each foreground class."""
    one_hot = F.one_hot(labels.long(), 4).movedim(-1, 1).double()
    p = logits.softmax(1)
    sums = ((p * one_hot).sum(axes), (p * (1 - one_hot)).sum(axes), ((1 - p) * one_hot).sum(axes))
    return [x[..., 1:] for x in sums]


def tversky(logits, labels, *, alpha, beta, gamma=1.0):
    overlap, positives, negatives = soft_sums(logits, labels)
    scores = (overlap + 1e-5) / (overlap + alpha * positives + beta * negatives + 1e-5)
    return ((1 - scores) ** (1 / gamma)).mean()


def generalized_dice(logits, labels):
    """Return 1 - one Dice of all classes, each weighted by its inverse squared size."""
    one_hot = F.one_hot(labels.long(), 4).movedim(-1, 1).double()
    p, axes = logits.softmax(1), (0, 2, 3, 4)
    sizes = one_hot.sum(axes)
    weights = (sizes.min() / sizes) ** 2
    overlap = (weights * (p * one_hot).sum(axes)).sum()
    return 1 - (2 * overlap + 1e-5) / ((weights * (p.sum(axes) + sizes)).sum() + 1e-5)


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits, labels.long(), **options)


def soft_dice(logits, labels):
    return dice_ce(logits, labels) - cross_entropy(logits, labels)


def focal(logits, labels):
    certainty = logits.softmax(1).gather(1, labels.long()[:, None])[:, 0]
    return ((1 - certainty) ** 2 * -certainty.log()).mean()


def worst_voxels(logits, labels):
    values = cross_entropy(logits, labels, reduction="none").flatten()
    return values.topk(values.numel() // 10).values.mean()


REFERENCES = {
    "default": dice_ce,
    "per volume": lambda x, y: dice_ce(x, y, batch=False),
    "focal": lambda x, y: soft_dice(x, y) + focal(x, y),
    "worst voxels": lambda x, y: soft_dice(x, y) + worst_voxels(x, y),
    "smoothed": lambda x, y: soft_dice(x, y) + cross_entropy(x, y, label_smoothing=0.1),
    "weighted": lambda x, y: (
        soft_dice(x, y) + cross_entropy(x, y, weight=x.new_tensor([0.25, 1, 1, 2]))
    ),
    "tversky": lambda x, y: tversky(x, y, alpha=0.3, beta=0.7) + cross_entropy(x, y),
    "focal_tversky": lambda x, y: tversky(x, y, alpha=0.3, beta=0.7, gamma=1.3333),
    "generalized_dice": generalized_dice,
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_value_and_gradient_equal_a_naive_reference(kind):
    loss, (logits, labels) = build("loss", *OWN[kind]), make_sample()
    value, expected = loss(logits, labels), REFERENCES[kind](logits, labels)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    gradient, plain = (torch.autograd.grad(2 * x, logits)[0] for x in (value, expected))
    torch.testing.assert_close(gradient, plain, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", OWN)
def test_backward_keeps_the_logits_and_the_labels_alone(kind):
    """Besides them, a few numbers per class and volume."""
    for dtype in (torch.float32, torch.bfloat16):
        loss, (logits, labels) = build("loss", *OWN[kind]), make_sample(dtype)
        value, nbytes = saved_bytes(lambda x=logits, loss=loss, y=labels: loss(x, y))
        assert logits.nbytes + labels.nbytes <= nbytes < logits.nbytes + labels.nbytes + 2000
        value.backward()
        assert logits.grad.dtype == dtype
        assert value.dtype == torch.float32


def test_the_loss_of_regions_is_a_sigmoid_for_each():
    words = ["loss.regions={whole:[1,2,3],core:[2,3],tip:[3]}"]
    loss, (logits, labels) = build("loss", *words), make_sample()
    logits = logits[:, :3].detach().requires_grad_()
    targets = torch.stack([labels >= n for n in (1, 2, 3)], 1).double()
    p, axes = logits.sigmoid(), (0, 2, 3, 4)
    dice = (2 * (p * targets).sum(axes) + 1e-5) / (p.sum(axes) + targets.sum(axes) + 1e-5)
    expected = 1 - dice.mean() + F.binary_cross_entropy_with_logits(logits, targets)
    value = loss(logits, labels)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    gradient, plain = (torch.autograd.grad(x, logits)[0] for x in (value, expected))
    torch.testing.assert_close(gradient, plain, rtol=1e-8, atol=1e-12)


def test_deep_supervision_weights_each_level_with_half_of_the_one_before():
    loss, (logits, labels) = build("loss"), make_sample()
    coarse = torch.randn(2, 4, 3, 7, 4, dtype=torch.float64)
    value = loss([logits, coarse], labels)
    nearest = F.interpolate(labels[:, None].double(), (3, 7, 4), mode="nearest-exact")[:, 0]
    expected = (2 * dice_ce(logits, labels) + dice_ce(coarse, nearest)) / 3
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


IGNORED = 3
STEP = [
    "data=pairs",
    "data.num_classes=3",
    f"data.ignore_label={IGNORED}",
    "data.patch_size=[16,16,16]",
    "data.batch_size=4",
    "data.num_workers=0",
    "augmentation=none",
    "model.norm=batch",
    "model.width=4",
    "optimizer=sgd",
    "optimizer.lr=1e-30",
    "optimizer.momentum=0.9",
    "optimizer.nesterov=false",
    "optimizer.weight_decay=0",
    "trainer.gradient_clip_val=null",
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "memory.estimate=false",
    "evaluation.enabled=false",
    "logger=none",
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Write five cases with ignored voxels; return their folder, images and labels."""
    root = tmp_path_factory.mktemp("ignored")
    rng = np.random.default_rng(0)
    images, labels = [], []
    for n in range(5):
        label = rng.integers(0, 3, (16, 16, 16)).astype(np.uint8)
        label[:, :4] = IGNORED
        image = (label + rng.normal(0, 1, label.shape)).astype(np.float32)
        for kind, array in (("images", image), ("labels", label)):
            (root / kind).mkdir(exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), root / kind / f"{n}.nii.gz")
        images.append((image - image.mean()) / image.std())
        labels.append(label)
    splits = [{"train": ["0", "1", "2", "3"], "val": ["4"]}]
    (root / "splits_final.json").write_text(json.dumps(splits))
    return root, images, labels


@pytest.mark.parametrize(
    "strategy", ["none", "fused", "skips", "lean", "leanest", "offload", "blocks"]
)
def test_the_first_step_of_a_run_is_that_of_plain_torch(strategy, cases, unet3d, tmp_path):
    """With SGD, the momentum in the checkpoint is the gradient; the learning rate moves nothing.

    Preprocessing, batch, network, loss and ignored voxels are those of the command.
    """
    root, images, labels = cases
    words = [*STEP, f"data.root={root}", f"data.cache={root / 'cache'}"]
    ended = unet3d("train", *words, f"checkpointing={strategy}", "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    content = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    state = {k.removeprefix("model."): v for k, v in content["state_dict"].items()}
    plain = PlainUNet(1, 3, [4, 8, 16], "batch", 0.01, torch.nn.MaxPool3d(2))
    fresh = {k: v for k, v in plain.state_dict().items() if "running" in k or "tracked" in k}
    plain.load_state_dict({**state, **fresh})
    plain.double()
    batch = torch.from_numpy(np.stack(images[:4]))[:, None].double()
    target = torch.from_numpy(np.stack(labels[:4]))
    loss = dice_ce(plain(batch), target, IGNORED)
    loss.backward()
    momenta = content["optimizer_states"][0]["state"]
    scale = max(p.grad.abs().max() for p in plain.parameters())
    for n, (name, p) in enumerate(plain.named_parameters()):
        gradient = momenta[n]["momentum_buffer"].double()
        torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-5 * scale, msg=name)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(state[name].double(), value.double(), rtol=1e-4, atol=1e-6)
    curves = json.loads((tmp_path / "run" / "curves.json").read_text())["curves"]
    assert curves["train/loss"] == [[1, pytest.approx(loss.item(), rel=1e-4)]]
