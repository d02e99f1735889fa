"""unet3d.estimate_step on training steps as scripts write them, against their real CPU steps."""

import copy
import json
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import unet3d
from tests.memory.helpers.oracle import measure_script
from unet3d.errors import UsageError
from unet3d.memory.any_step import CONTEXT_BYTES, RESERVED_MARGIN, StepEstimate

CUBE = (2, 1, 16, 16, 16)
STEPS: dict[str, Callable[[], Callable[[], Any]]] = {}


def everyday(build):
    STEPS[build.__name__] = build
    return build


def make_network(width=4, classes=3):
    return nn.Sequential(
        *(nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width, affine=True)),
        *(nn.LeakyReLU(inplace=True), nn.Conv3d(width, classes, 1)),
    )


def make_batch(size=16):
    return torch.randn(2, 1, size, size, size), torch.randint(0, 3, (2, size, size, size))


def loop(network, compute_loss: Any = F.cross_entropy, batch: Any = make_batch, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(network.parameters())

    def step():
        optimizer.zero_grad()
        *inputs, target = batch()
        compute_loss(network(*inputs), target).backward()
        optimizer.step()

    return step


def mean(outputs: Tensor, target: Any) -> Tensor:
    return outputs.mean()


def make_tokens():
    return torch.randint(0, 500, (8, 16)), torch.randint(0, 10, (8,))


def make_features(*shape):
    return lambda: (torch.randn(*shape), None)


@everyday
def plain_loop_that_keeps_its_outputs():
    network = make_network()
    optimizer, kept = torch.optim.AdamW(network.parameters()), {}

    def step():
        optimizer.zero_grad()
        x, y = make_batch()
        outputs = network(x)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()
        kept.update(x=x, y=y, outputs=outputs, loss=loss)

    return step


@everyday
def loss_of_a_call():
    return loop(make_network())


@everyday
def dropout():
    layers = nn.Conv3d(1, 4, 3, padding=1), nn.Dropout(0.5), nn.ReLU(), nn.Dropout3d(0.2)
    return loop(nn.Sequential(*layers, nn.Conv3d(4, 3, 1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def make_sequences():
    return torch.randn(4, 64, 32), torch.randint(0, 10, (4,))


@everyday
def attention():
    return loop(Attention(), batch=make_sequences)


@everyday
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    network = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(32, 10))
    return loop(network, lambda y, target: F.cross_entropy(y.mean(1), target), make_sequences)


class FourierLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 4, 1), nn.Conv3d(4, 2, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 4, 4, 4, dtype=torch.cfloat))

    def forward(self, x):
        x = self.first(x)
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        mixed = torch.zeros_like(modes)
        equation = "bixyz,ioxyz->boxyz"
        mixed[..., :4, :4, :4] = torch.einsum(equation, modes[..., :4, :4, :4], self.weight)
        return self.last(F.gelu(torch.fft.irfftn(mixed, s=x.shape[2:], dim=(2, 3, 4))))


@everyday
def fourier_layer():
    return loop(FourierLayer(), mean, make_features(*CUBE))


@everyday
def adversarial_networks():
    def convs(conv, *channels):
        layers = [conv(a, b, 4, 2, 1) for a, b in pairwise(channels)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.LeakyReLU(0.2))))

    generator, critic = convs(nn.ConvTranspose3d, 8, 4, 1), convs(nn.Conv3d, 1, 4, 8)
    optimizers = [torch.optim.Adam(network.parameters()) for network in (generator, critic)]
    compute = F.binary_cross_entropy_with_logits

    def step():
        real, noise = torch.randn(CUBE), torch.randn(2, 8, 4, 4, 4)
        optimizers[1].zero_grad()
        fake = generator(noise)
        yes, no = critic(real), critic(fake.detach())
        (compute(yes, torch.ones_like(yes)) + compute(no, torch.zeros_like(no))).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judged = critic(fake)
        compute(judged, torch.ones_like(judged)).backward()
        optimizers[0].step()

    return step


@everyday
def gradient_accumulation():
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters())

    def step():
        for _ in range(4):
            x, y = make_batch()
            (F.cross_entropy(network(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@everyday
def averaged_model():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    network = make_perceptron()
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    train = loop(network, mean, make_features(16, 64))

    def step():
        train()
        average.update_parameters(network)

    return step


@everyday
def momentum_teacher():
    """A copy of the network that learns from its weights, as of mean teachers and MoCo."""
    network = make_network()
    teacher = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def step():
        x, _ = make_batch()
        with torch.no_grad():
            target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        optimizer.zero_grad()
        F.cross_entropy(network(x), target).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), network.parameters(), strict=True):
                old.lerp_(new, 0.01)

    return step


class Islands(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv3d(n, 4, 3, padding=1) for n in (1, 4))
        self.head = nn.Conv3d(4, 3, 1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = F.relu(self.a(x))
        with torch.autocast("cpu", enabled=False):
            x = F.instance_norm(self.b(x.float()))
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(x)


@everyday
def autocast_in_regions():
    return loop(Islands(), lambda y, target: F.cross_entropy(y.float(), target))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [(nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU()) for _ in "abcd"]
        self.body = nn.Sequential(*(layer for block in blocks for layer in block))
        self.first, self.head = nn.Conv3d(1, 4, 1), nn.Conv3d(4, 3, 1)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint_sequential

        return self.head(checkpoint_sequential(self.body, 2, self.first(x), use_reentrant=False))


@everyday
def checkpoint_sequential():
    return loop(Checkpointed())


@everyday
def gradient_penalty():
    layers = nn.Conv3d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv3d(4, 1, 4)
    network = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(network.parameters())

    def step():
        optimizer.zero_grad()
        x = torch.randn(CUBE, requires_grad=True)
        y = network(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        penalty = ((grad.flatten(1).norm(2, 1) - 1) ** 2).mean()
        (y.mean() + 10 * penalty).backward()
        optimizer.step()

    return step


class Adapted(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def train_rest(network, *args, **kwargs):
    trained = [p for p in network.parameters() if p.requires_grad]
    return loop(network, *args, optimizer=torch.optim.AdamW(trained), **kwargs)


@everyday
def low_rank_adapters():
    layers = Adapted(nn.Linear(64, 256)), nn.GELU(), Adapted(nn.Linear(256, 64))
    return train_rest(nn.Sequential(*layers), mean, make_features(16, 64))


@everyday
def frozen_encoder():
    network = make_network()
    network[:3].requires_grad_(False)
    return train_rest(network)


@everyday
def weights_in_half_precision():
    network = make_network().to(torch.bfloat16)

    def batch():
        x, y = make_batch()
        return x.to(torch.bfloat16), y

    return loop(network, lambda y, target: F.cross_entropy(y.float(), target), batch)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * (grad * x)


@everyday
def autograd_function():
    network = nn.Conv3d(1, 4, 3, padding=1)
    return loop(network, lambda y, target: Square.apply(Square.apply(y)).mean())


class Tokens(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 32, sparse=sparse), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


@everyday
def sparse_gradients():
    network = Tokens(sparse=True)
    return loop(network, batch=make_tokens, optimizer=torch.optim.SGD(network.parameters(), 0.1))


class Drawn(nn.Module):
    """Reads numbers while it is made, as vision transformers do."""

    def __init__(self):
        super().__init__()
        widths = [int(x.item()) for x in torch.linspace(4, 8, 3)]
        # The stages of timm's networks.
        parts = [x.tolist() for x in torch.linspace(4, 8, 5, device="cpu").split([2, 3])]
        widths += [round(width) for part in parts for width in part]
        self.layers = nn.ModuleList(map(nn.Linear, [16, *widths], [*widths, 16]))
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


@everyday
def weights_that_are_drawn_in_a_range():
    return loop(Drawn(), mean, make_features(16, 16))


@everyday
def token_inputs():
    return loop(Tokens(sparse=False), batch=make_tokens)


@everyday
def inputs_of_several_sizes():
    network = make_network()
    steps = [loop(network, batch=partial(make_batch, size)) for size in (16, 24)]
    return lambda: [step() for step in steps]


@everyday
def loss_with_class_weights():
    return loop(make_network(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3])))


@everyday
def batch_made_before_the_step():
    batch = make_batch()
    return loop(make_network(), batch=lambda: batch)


@everyday
def tied_weights():
    network = nn.Sequential(nn.Embedding(200, 32), nn.Linear(32, 200, bias=False))
    network[1].weight = network[0].weight
    network = network.to(torch.bfloat16)

    def batch():
        return torch.randint(0, 200, (8, 16)), torch.randint(0, 200, (8, 16))

    return loop(network, lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()), batch)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.time = nn.Conv3d(1, 4, 3, padding=1), nn.Linear(16, 4)
        self.head = nn.Conv3d(4, 3, 1)

    def forward(self, x, t):
        return self.head(F.silu(self.conv(x) + self.time(t)[:, :, None, None, None]))


@everyday
def two_inputs_clipping_and_a_schedule():
    network = TwoInputs()
    optimizer = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def step():
        optimizer.zero_grad()
        outputs = network(torch.randn(CUBE), torch.randn(2, 16))
        F.mse_loss(outputs, torch.randn_like(outputs)).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


@everyday
def lightning_module():
    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = make_network()

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.network(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    model, batch = Model(), make_batch()
    optimizer = model.configure_optimizers()

    def step():
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()

    return step


@everyday
def smooth_l1_loss():
    return loop(
        make_network(classes=1), lambda y, target: F.smooth_l1_loss(y[:, 0], target.float())
    )


@everyday
def sparse_bags():
    network = nn.EmbeddingBag(2000, 32, mode="sum", sparse=True)
    batch = partial(torch.randint, 0, 2000, (16, 200))
    return loop(network, mean, lambda: (batch(), None), torch.optim.SGD(network.parameters(), 0.1))


@everyday
def memory_that_grows():
    network, kept = nn.Linear(64, 64), torch.empty(0)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        parts = network(torch.randn(400, 64)).split(100)
        torch.cat([part.detach() for part in parts], out=kept)
        sum(part.square().mean() for part in parts).backward()
        optimizer.step()

    return step


@everyday
def copies_of_views_and_of_gradients():
    table = torch.randn(500, 100)
    network, weight = nn.Linear(64, 64), torch.randn(300, 300, requires_grad=True)
    network.register_buffer("first", table[:10])
    network.register_buffer("rest", table[10:])
    network.register_buffer("positions", torch.arange(300.0).expand(300, 300))
    optimizer, kept = torch.optim.SGD([*network.parameters(), weight], 0.1), []

    def step():
        optimizer.zero_grad()
        (network(torch.randn(9, 64)).mean() + (weight * 1).mean()).backward()
        kept[:] = copy.deepcopy(network), copy.deepcopy(weight)
        optimizer.step()

    return step


@everyday
def sizes_that_the_script_knows():
    def sizes(y, _):
        return sum(part.mean() for part in y.split(torch.tensor([9, 31]).tolist()))

    return loop(nn.Linear(64, 64), sizes, make_features(40, 64))


@everyday
def neighborhoods_as_columns():
    network = nn.Conv2d(3, 3, 1)

    def loss(x, _):
        columns = F.unfold(network(x), 3, padding=1)
        return F.fold(columns, (24, 24), 3, padding=1).square().mean()

    return loop(nn.Conv2d(3, 3, 1), loss, make_features(2, 3, 24, 24))


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_a_step_is_that_of_a_cpu_to_the_byte(name):
    torch.manual_seed(0)
    estimated, measured = (
        unet3d.estimate_step(STEPS[name], device="cpu"),
        measure_script(STEPS[name]),
    )
    assert estimated.peak == measured.peak


def logits_loss(y, _):
    return F.binary_cross_entropy_with_logits(y, torch.rand(y.shape))


def weighted_logits_loss(y, _):
    weight = torch.ones(y.shape[1], 1, 1)
    return F.binary_cross_entropy_with_logits(y, torch.rand(y.shape), pos_weight=weight)


def unreduced_logits_loss(y, _):
    return F.binary_cross_entropy_with_logits(y, torch.rand(y.shape), reduction="none").mean()


def transposed_classes_loss(y, _):
    labels = torch.zeros(len(y), *y.shape[2:], dtype=torch.long)
    return F.cross_entropy(y.transpose(2, 3), labels)


def channels_last_softmax(y, _):
    return y.contiguous(memory_format=torch.channels_last).softmax(1)[:, 0].mean()


def mean_and_variance(y, _):
    variance, average = torch.var_mean(y, 1)
    return variance.mean() + average.mean()


def transposed_columns(y, _):
    columns = y.flatten(2).transpose(1, 2).contiguous().transpose(1, 2)  # (2, 27, 1024)
    return F.fold(columns, (32, 32), 3, padding=1).square().mean()


@pytest.mark.parametrize(
    "compute_loss",
    [
        *(logits_loss, weighted_logits_loss, unreduced_logits_loss),
        *(transposed_classes_loss, channels_last_softmax, transposed_columns),
        mean_and_variance,
    ],
)
def test_losses_that_copy_what_is_strided_or_reuse_memory_are_exact(compute_loss):
    def build():
        return loop(nn.Conv2d(3, 27, 1), compute_loss, make_features(2, 3, 32, 32))

    estimated = unet3d.estimate_step(build, device="cpu")
    assert estimated.peak == measure_script(build).peak


def resize(size, mode, **options):
    return lambda x: F.interpolate(x, (size, size), mode=mode, **options)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "reduce",
    [
        *(resize(size, mode) for size in (40, 100) for mode in ("nearest", "bilinear", "area")),
        *(resize(100, "bicubic"), resize(70, "bilinear", antialias=True)),
        *(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(9)),
        *(partial(torch.fft.rfft, dim=2), lambda x: x.kthvalue(5, 1, True).values),
        lambda x: x * torch.isin(x.detach().round(), torch.arange(99.0)),
    ],
)
def test_what_kernels_of_a_cpu_copy_or_sort_is_counted(reduce, memory_format):
    def build():
        x = torch.rand(2, 8, 50, 50).to(memory_format=memory_format)
        scale = nn.Parameter(torch.ones(8, 1, 1))
        optimizer = torch.optim.SGD([scale], 0.1)

        def step():
            optimizer.zero_grad()
            y = x * scale
            reduced = reduce(y)
            (reduced.abs() if reduced.is_complex() else reduced).sum().backward()
            optimizer.step()

        return step

    estimated = unet3d.estimate_step(build, device="cpu").peak
    assert estimated == pytest.approx(measure_script(build).peak, rel=0.002)  # isin: few values


def bilinear():
    left, form = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)
    optimizer = torch.optim.AdamW([*left.parameters(), *form.parameters()])
    x, y = torch.randn(64, 8), torch.randn(64, 8)

    def step():
        optimizer.zero_grad()
        form(left(x), y).square().mean().backward()
        optimizer.step()

    return step


def nearest_codes():
    encoder, codes = nn.Linear(8, 16), nn.Embedding(32, 16)
    optimizer = torch.optim.SGD([*encoder.parameters(), *codes.parameters()], 0.1)
    x = torch.randn(512, 8)

    def step():
        optimizer.zero_grad()
        features = encoder(x)
        with torch.no_grad():
            nearest = torch.cdist(features, codes.weight).argmin(1)
        (codes(nearest) - features).square().mean().backward()
        optimizer.step()

    return step


def shifted_windows():
    return loop(
        nn.Conv2d(3, 4, 1),
        lambda y, _: torch.roll(y, (-2, -2), (2, 3)).mean(),
        make_features(2, 3, 32, 32),
    )


def measured_without_gradients():
    network, x = nn.Linear(4, 4), torch.randn(64, 64)

    def compute_loss(y, _):
        with torch.no_grad():
            x.count_nonzero(1)
            torch.dist(x, 2 * x)
            x.roll((1, 1), (0, 1))
        return y.mean()

    return loop(network, compute_loss, make_features(8, 4))


def median_of_several():
    network = nn.Conv3d(1, 1, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def step():
        x = torch.rand(5, 1, 16, 16, 16)
        with torch.no_grad():
            target = network(x).median(0, keepdim=True).values
        optimizer.zero_grad()
        F.mse_loss(network(x[:1]), target).backward()
        optimizer.step()

    return step


def graph_convolutions():
    adjacency = torch.sparse_coo_tensor(
        torch.randint(0, 200, (2, 6000)), torch.rand(6000), (200, 200), check_invariants=False
    )
    layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    optimizer, x = torch.optim.Adam(layers.parameters()), torch.rand(200, 16)

    def step():
        optimizer.zero_grad()
        hidden = torch.sparse.mm(adjacency, layers[0](x)).relu()
        torch.sparse.mm(adjacency, layers[1](hidden)).square().mean().backward()
        optimizer.step()

    return step


def beams():
    weights = nn.Parameter(torch.rand(8, 16, 64, dtype=torch.cfloat))
    optimizer = torch.optim.SGD([weights], 0.1)

    def step():
        x = torch.rand(8, 64, 256, dtype=torch.cfloat)
        optimizer.zero_grad()
        torch.bmm(weights, x).abs().square().mean().backward()
        optimizer.step()

    return step


def principal_axes():
    network = nn.Linear(8, 8)

    def compute_loss(y, _):
        with torch.no_grad():
            torch.linalg.eigh(torch.eye(100))
        return y.mean()

    return loop(network, compute_loss, make_features(8, 8))


@pytest.mark.parametrize(
    "build",
    [
        *(bilinear, nearest_codes, shifted_windows, measured_without_gradients),
        *(median_of_several, graph_convolutions, beams),
    ],
)
def test_what_operators_allocate_between_their_parts_is_counted(build):
    estimated = unet3d.estimate_step(build, device="cpu")
    assert estimated.peak == measure_script(build).peak


def test_the_workspace_of_eigenvectors_is_counted():
    estimated = unet3d.estimate_step(principal_axes, device="cpu").peak
    assert estimated == pytest.approx(measure_script(principal_axes).peak, abs=16)


def test_an_optimizer_that_wraps_another_is_no_second_one():
    def build():
        network, fabric = nn.Linear(64, 10), Fabric(accelerator="cpu", devices=1)
        network, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters()))
        return loop(network, mean, make_features(32, 64), optimizer)

    assert unet3d.estimate_step(build, device="cpu").details.notes == []


def test_a_number_that_a_script_reads_may_be_copied():
    def compute_loss(y, _):
        copy.deepcopy([copy.copy(y.mean().item())])
        pickle.dumps(y.mean().item())
        return y.mean()

    assert estimate_with(compute_loss).details.notes == []


@pytest.mark.parametrize("activate", [Tensor.softmax, Tensor.log_softmax])
def test_the_gradient_of_a_softmax_is_copied_where_it_is_strided(activate):
    def build():
        logits = nn.Parameter(torch.rand(2, 4, 12, 12, 12))
        optimizer = torch.optim.SGD([logits], 0.1)
        mask = torch.rand(2, 12, 12, 12, 4).permute(0, 4, 1, 2, 3)

        def step():
            optimizer.zero_grad()
            (activate(logits, 1) * mask).sum().backward()
            optimizer.step()

        return step

    estimated = unet3d.estimate_step(build, device="cpu")
    assert estimated.peak == measure_script(build).peak


def optimizers_in_backward():
    network = make_network()

    def update(optimizer, parameter):
        optimizer.step()
        optimizer.zero_grad()

    for parameter in network.parameters():
        optimizer = torch.optim.AdamW([parameter])
        parameter.register_post_accumulate_grad_hook(partial(update, optimizer))

    def step():
        x, y = make_batch()
        F.cross_entropy(network(x), y).backward()

    return step


def test_an_optimizer_that_runs_in_backward_ends_no_phase():
    estimated = unet3d.estimate_step(optimizers_in_backward, device="cpu")
    assert estimated.peak == measure_script(optimizers_in_backward).peak
    (start, stop), trace = estimated.details.steady_step, estimated.details.trace
    phases = [p.phase for p in trace.phases if start <= p.start and p.stop <= stop]
    assert phases.count("optimizer") == 6
    assert phases[phases.index("optimizer") + 1] == "backward"


def estimate_with(compute_loss, network=None, device="cpu"):
    return unet3d.estimate_step(
        lambda: loop(network or make_network(), compute_loss), device=device
    )


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("compute_loss", "message"),
    [
        (
            lambda y, _: y[y > 0].mean(),
            r"a shape depends on values .*test_any_step.py:\d+: .*y > 0",
        ),
        (lambda y, _: y.mean() * torch.equal(y, y), r"reads values .*test_any_step.py:\d+: "),
        (lambda y, target: F.cross_entropy(y, target, WEIGHTS), r"made before.*: .*WEIGHTS"),
    ],
)
def test_what_tensors_without_values_cannot_do_is_named_with_its_line(compute_loss, message):
    with pytest.raises(UsageError, match=message) as caught:
        estimate_with(compute_loss)
    assert "\n" not in str(caught.value)


def test_a_network_made_outside_of_build_is_an_error():
    network = make_network()
    with pytest.raises(UsageError, match="made before: make it in the build of estimate_step"):
        estimate_with(mean, network)
    with pytest.raises(UsageError, match="build must return a function that takes a step"):
        unet3d.estimate_step(lambda: None)
    with pytest.raises(UsageError, match="budget_gib must be a number above 0, got 0"):
        unet3d.estimate_step(lambda: loop(make_network()), budget_gib=0)


@pytest.mark.parametrize("way", ["function", "method"])
def test_a_compiled_network_is_estimated_as_plain_modules(way):
    def build(compiles=True, **options):
        network = unet3d.UNet3D(in_channels=1, num_classes=3, depth=2, width=4, **options)
        if compiles:
            network = torch.compile(network) if way == "function" else network
            network.compile(mode="max-autotune")
        return loop(network)

    compiled = unet3d.estimate_step(build, device="cpu")
    plain = unet3d.estimate_step(partial(build, compiles=False, fused=False), device="cpu")
    assert compiled.peak == plain.peak
    note = "compiled networks are estimated as plain modules"
    assert note in repr(compiled)
    assert note not in repr(plain)


def test_recurrent_layers_are_said_to_keep_more():
    def build():
        return loop(nn.LSTM(8, 8), lambda y, _: y[0].mean(), make_features(4, 2, 8))

    assert "recurrent layers" in repr(unet3d.estimate_step(build, device="cpu"))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_step_of_several_processes_is_refused_with_the_reason(wrap):
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make = nn.parallel.DistributedDataParallel if wrap == "ddp" else fully_shard
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UsageError, match="exchanges values with other processes"):
            unet3d.estimate_step(lambda: loop(make(make_network())), device="cpu")
    finally:
        dist.destroy_process_group()


def build_for_cuda(device="cuda", autocast="cuda"):
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 3, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters())
    scaler = torch.amp.GradScaler(enabled=False)

    def step():
        x, y = (tensor.to(device) for tensor in make_batch())
        with torch.autocast(autocast, torch.float16):
            loss = F.cross_entropy(network(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        loss.detach().cpu().numpy()

    return step


def test_a_script_for_a_gpu_is_estimated_without_one():
    estimate = unet3d.estimate_step(build_for_cuda, budget_gib=1)
    same = unet3d.estimate_step(partial(build_for_cuda, "cpu", "cpu"))
    assert estimate.peak == same.peak < estimate.reserved
    kinds = estimate.details.kinds
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 3, 1))
    sizes = [-(-p.nbytes // 512) * 512 for p in network.parameters()]
    assert kinds["parameters"] == sum(sizes)
    assert kinds["input"] == 2 * 16**3 * 4
    assert kinds["saved activations"] >= 2 * 8 * 16**3 * 2
    assert {"forward", "backward", "optimizer"} == set(estimate.details.phases)
    assert repr(estimate).startswith("fits 1.0 GiB: yes, with ")


def test_the_answer_says_what_is_left_or_missing():
    estimate = unet3d.estimate_step(build_for_cuda)
    low, high = estimate.process
    assert low == estimate.peak + 270 * 2**20
    at_most = estimate.details.peak.reserved_at_most
    assert high == at_most + 850 * 2**20
    assert estimate.reserved_at_most == int(1.1 * at_most)
    assert (
        estimate.describe_fit() == "takes 602 MiB of a GPU; give budget_gib to see whether it fits"
    )
    for budget, answer in [
        (low - 1, "no: it takes at least"),
        (low, "unlikely: it takes"),
        (estimate.reserved + 600 * 2**20, "likely: it takes"),
        (high, "yes, with 0"),
    ]:
        estimate.budget = budget
        assert answer in estimate.describe_fit()


def test_all_recorded_steps_but_one_are_within_the_ranges():
    reserved, processes = [], []
    for rows in read_gpu_rows():
        reserved.append([])
        for row in rows:
            estimated, measured = row["predicted"], row["measured"]
            least = estimated["allocated"]
            at_most = estimated.get("reserved_at_most") or estimated["reserved"]
            reserved[-1].append(least <= measured["reserved"] <= RESERVED_MARGIN * at_most)
            low, high = least + CONTEXT_BYTES[0], at_most + CONTEXT_BYTES[1]
            processes.append(low <= measured["process"] <= high)
    assert [(len(rows), sum(rows)) for rows in reserved] == [(82, 81), (15, 15)]
    assert (len(processes), sum(processes)) == (97, 96)


def read_gpu_rows():
    """Yield the rows of each GPU with an estimate and what a process took."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    for file in sorted(benchmarks.glob("nvidia-*.json")):
        parts = json.loads(file.read_text())["parts"].values()
        rows = [row for part in parts for row in part["rows"].values() if "predicted" in row]
        yield [row for row in rows if row.get("measured", {}).get("process")]


def accumulate(every, optimizer=torch.optim.AdamW):
    network, calls = make_network(), []
    optimizer = optimizer(network.parameters())

    def step():
        calls.append(1)
        x, y = make_batch()
        F.cross_entropy(network(x), y).backward()
        if every and len(calls) % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_a_step_is_called_until_its_optimizer_has_updated_the_weights():
    once = unet3d.estimate_step(partial(accumulate, 1)).details.kinds
    fourth = unet3d.estimate_step(partial(accumulate, 4))
    assert fourth.details.kinds["optimizer state"] == once["optimizer state"] > 0
    assert not fourth.details.notes
    never = unet3d.estimate_step(partial(accumulate, 0))
    assert never.details.notes == [
        "AdamW made no update in 64 calls: what it takes is left out, and backward if that did not "
        "run"
    ]


def keep_on_host(offload):
    network = nn.Sequential(*(nn.Conv3d(8, 8, 3, padding=1) for _ in range(6))).to("cuda")

    def step():
        x = torch.randn(1, 8, 16, 16, 16).pin_memory().to("cuda", non_blocking=True)
        with offload():
            loss = network(x).mean()
        loss.backward()

    return step


@pytest.mark.parametrize("calls", [2, 3])
def test_an_update_in_every_nth_call_is_part_of_the_estimate(calls):
    def build(*, at_once):
        network = nn.Linear(64, 64)
        optimizer, done = torch.optim.AdamW(network.parameters()), []

        def call():
            network(torch.randn(4, 64)).sum().backward()
            done.append(None)
            if len(done) % calls == 0:
                optimizer.step()
                optimizer.zero_grad()

        return (lambda: [call() for _ in range(calls)]) if at_once else call

    estimated = unet3d.estimate_step(partial(build, at_once=False), device="cpu").peak
    assert estimated == measure_script(partial(build, at_once=True)).peak


@pytest.mark.parametrize("pin_memory", [True, False])
def test_what_torch_saves_on_the_host_is_no_memory_of_the_gpu(pin_memory):
    offload = partial(torch.autograd.graph.save_on_cpu, pin_memory=pin_memory)
    stored, offloaded = (
        unet3d.estimate_step(partial(keep_on_host, way)) for way in (nullcontext, offload)
    )
    assert offloaded.peak <= stored.peak - 3 * 8 * 16**3 * 4  # of six maps


GRADIENTS = {
    "rows of a table": lambda t: t[torch.randint(0, 200, (9,))],
    "picked values": lambda t: t.gather(0, torch.randint(0, 200, (5, 32))),
    "values by their number": lambda t: t.take(torch.randint(0, 200, (9,))),
    "the largest": lambda t: t.topk(2, 1).values,
    "the median": lambda t: t.median(1).values,
    "the larger of two": lambda t: torch.maximum(t, t.flip(0)),
    "masked": lambda t: torch.where(t > 1, t, 0.0).masked_fill(t > 2, 0.0),
    "written and read": lambda t: t.index_put((torch.arange(99),), torch.zeros(99, 32))[:, [0, 3]],
    "a Cholesky factor": lambda t: torch.linalg.cholesky(t[:32] @ t[:32].T + 99 * torch.eye(32)),
    "a soft margin": lambda t: F.soft_margin_loss(t, torch.ones_like(t)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_torch_fills_in_place_are_counted_once(name):
    def build():
        table = nn.Parameter(torch.rand(200, 32))
        optimizer = torch.optim.SGD([table], 0.1)

        def step():
            optimizer.zero_grad()
            GRADIENTS[name](table * 1).square().mean().backward()
            optimizer.step()

        return step

    assert unet3d.estimate_step(build, device="cpu").peak == measure_script(build).peak


def test_sizes_and_branches_by_value_are_said_with_their_line():
    def by_value(y, target):
        mask = F.one_hot(target).movedim(-1, 1)
        return (y[:, : mask.shape[1]] * mask).mean()

    estimate = estimate_with(by_value)
    assert re.search(
        r"are 0 and False in an estimate.* read at .*test_any_step.py:\d+$", repr(estimate)
    )
    assert "; the estimate has 1 note" in StepEstimate(estimate.details, 2**30).describe_fit()
    arrays = estimate_with(lambda y, _: y[: int((y > 9).numpy().sum()) + 1].mean())
    assert re.search(r"are read at .*test_any_step.py:\d+$", repr(arrays))
    assert "in an estimate" not in repr(
        estimate_with(lambda y, _: y.mean() * y.detach().numpy().mean())
    )
    assert "in an estimate" not in repr(
        estimate_with(lambda y, _: y.mean() * float(y.mean().detach()))
    )
    with pytest.raises(UsageError, match=r"^cannot .*assert holds; .*are 0 and False in an est"):
        estimate_with(lambda y, _: check(y.isfinite().all(), y.mean()))


def test_floats_that_a_script_compares_are_said_with_their_line():
    choose = estimate_with(lambda y, _: y.mean() if 1 + y.mean().item() > 1e-6 else y.sum())
    assert re.search(r"are 0 and False .* read at .*test_any_step.py:\d+$", repr(choose))
    used = estimate_with(lambda y, _: y.mean() * (1 - 2 / y.mean().item()) / abs(y.sum().item()))
    assert "in an estimate" not in repr(used)


def test_an_obstacle_that_a_script_catches_ends_the_estimate():
    def try_mask(y, _):
        with suppress(Exception):
            return y[y > 0].mean()
        return y.mean()

    with pytest.raises(UsageError, match=r"a shape depends on values .*y > 0"):
        estimate_with(try_mask)


@pytest.mark.parametrize(
    ("compute_loss", "device", "note"),
    [
        (lambda y, _: y.prod(1).mean(), "cuda", "torch.prod is estimated as for inputs with zeros"),
        (lambda y, _: y.prod(), "cpu", "torch.prod is estimated as for inputs with zeros"),
        (lambda y, _: y.cumprod(1).mean(), "cpu", "torch.cumprod is estimated as for inputs"),
        (lambda y, _: y.max(), "cpu", "torch.max of all values is estimated as on a GPU"),
        (lambda y, _: y.median(), "cpu", "torch.median of all values is estimated as on a GPU"),
        (lambda y, _: -y.min(), "cpu", "torch.min of all values is estimated as on a GPU"),
        (lambda y, _: torch.matrix_exp(y).mean(), "cpu", "torch.matrix_exp is estimated without"),
        (lambda y, _: y.max(), "cuda", None),
        (lambda y, _: y.max(1).values.mean(), "cpu", None),
    ],
)
def test_formulas_that_read_values_are_said_to_be_estimated_otherwise(compute_loss, device, note):
    notes = estimate_with(compute_loss, device=device).details.notes
    assert len(notes) == (note is not None)
    assert all(f"the gradient of {note}" in found for found in notes)


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_the_gradient_of_bags_sorts_their_indices(mode):
    def build():
        network = nn.EmbeddingBag(500, 16, mode=mode)
        return loop(network, mean, lambda: (torch.randint(0, 500, (64, 100)), None))

    estimated = unet3d.estimate_step(build, device="cpu").peak
    assert estimated == pytest.approx(measure_script(build).peak, abs=16)


def test_a_step_without_tensors_and_a_budget_without_end_are_refused():
    with pytest.raises(UsageError, match="uses no tensors"):
        unet3d.estimate_step(lambda: lambda: None)
    with pytest.raises(UsageError, match="must be a number above 0, got inf"):
        unet3d.estimate_step(build_for_cuda, budget_gib=float("inf"))


def test_the_checks_of_distributions_do_not_end_an_estimate():
    def build():
        def loss(y, _):
            actions = torch.distributions.Categorical(logits=y)
            noisy = torch.distributions.Normal(y, 1.0).rsample()
            return noisy.mean() - actions.log_prob(actions.sample()).mean()

        return loop(nn.Linear(64, 64), loss, make_features(40, 64))

    estimated = unet3d.estimate_step(build, device="cpu").peak
    assert estimated == pytest.approx(measure_script(build).peak, rel=0.01)


def test_a_script_saves_no_checkpoint_and_waits_for_no_gpu(tmp_path):
    path = tmp_path / "best.pt"
    path.write_text("values")

    def build():
        network = make_network()
        step = loop(network)
        return lambda: (step(), torch.save(network.state_dict(), path), torch.cuda.synchronize())

    unet3d.estimate_step(build)
    assert path.read_text() == "values"


def test_what_sparse_adam_computes_is_said_to_be_left_out():
    def build():
        network = nn.Embedding(200, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(network.parameters())
        return loop(network, mean, lambda: (torch.randint(0, 200, (9,)), None), optimizer)

    notes = unet3d.estimate_step(build, device="cpu").details.notes
    assert notes == ["what SparseAdam computes with sparse gradients is not estimated"]


def test_asgd_is_said_to_average_from_the_start():
    def build():
        network = make_network()
        return loop(network, optimizer=torch.optim.ASGD(network.parameters()))

    assert "ASGD is estimated as after" in repr(unet3d.estimate_step(build, device="cpu"))
    assert "ASGD" not in repr(unet3d.estimate_step(build))


def check(holds, value):
    assert holds
    return value


class SquareInFloat32(Square):
    forward = torch.amp.custom_fwd(Square.forward, device_type="cuda", cast_inputs=torch.float32)
    backward = torch.amp.custom_bwd(Square.backward, device_type="cuda")


def square_if_autocast_is_on(x):
    is_on = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return Square.apply(x.float() if is_on else x)


@pytest.mark.parametrize("square", [SquareInFloat32.apply, square_if_autocast_is_on])
def test_a_script_learns_that_autocast_is_on(square):
    def build(square):
        network = nn.Linear(64, 256)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                loss = square(network(torch.randn(512, 64))).mean()
            loss.backward()
            return f"{loss:.3f}"

        return step

    expected = unet3d.estimate_step(partial(build, lambda x: Square.apply(x.float())))
    assert unet3d.estimate_step(partial(build, square)).peak == expected.peak


ASKS = [
    lambda x: torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    lambda x: torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0,
    lambda x: x.is_cuda and not x.is_cpu,
    lambda x: x.device == torch.device("cuda:0") and x.get_device() == 0,
    lambda x: nn.Parameter(x).to("cuda").device.type == "cuda",
    lambda x: x.new_zeros(2, device=x.device).is_cuda,
    lambda x: torch.randn(2, generator=torch.Generator("cuda"), device="cuda").is_cuda,
    lambda x: torch.amp.GradScaler("cuda").is_enabled(),
    lambda x: torch.get_autocast_dtype("cuda") == torch.float16,
    lambda x: torch.accelerator.is_available() and torch.accelerator.current_accelerator() == GPU,
    lambda x: LightningModule().to(torch.device("cuda:0")).device == GPU,
    lambda x: LightningModule().cuda().device == GPU,
]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("ask", ASKS)
def test_a_script_learns_that_its_tensors_are_on_a_gpu(ask):
    def build(ask):
        network = nn.Linear(64, 256)

        def step():
            x = torch.randn(512, 64)
            with torch.autocast("cuda", torch.bfloat16, enabled=ask(x)):
                network(x).square().mean().backward()

        return step

    estimate = unet3d.estimate_step(partial(build, ask)).peak
    assert estimate == unet3d.estimate_step(partial(build, lambda x: True)).peak
    assert unet3d.estimate_step(partial(build, lambda x: not ask(x))).peak != estimate


ATTEND, DROP = F.scaled_dot_product_attention, F.dropout  # as imported by their names


def attend(width, *, attend=None, p=0.0, dtype=torch.float32, backend=None):
    layer = nn.Linear(64, 12 * width)

    def step():
        q, k, v = layer(torch.randn(2, 128, 64)).to(dtype).unflatten(-1, (3, 4, -1)).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend) if backend else nullcontext():
            (attend or F.scaled_dot_product_attention)(q, k, v, dropout_p=p).mean().backward()

    return step


def multiply(q, k, v, dropout_p=0.0):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


SCORES = 2 * 4 * 128**2
BACKENDS = SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION


def test_attention_stores_its_scores_unless_a_kernel_may_be_chosen():
    def count(width=16, backend=None, dtype=torch.float32, **options):
        build = partial(attend, width, backend=backend, dtype=dtype, **options)
        return unet3d.estimate_step(build).peak

    fast, slow = count(), count(attend=multiply)
    assert slow - fast > 4 * SCORES
    assert count(attend=ATTEND) == fast == count(backend=BACKENDS[1])
    assert min(count(backend=BACKENDS[0]), count(backend=BACKENDS[2])) >= slow
    assert count(17) - count(16) > 4 * SCORES
    half = {n: count(backend=b, dtype=torch.bfloat16) for n, b in enumerate((*BACKENDS, None))}
    assert half[3] == half[2] < half[0] - 2 * SCORES
    assert count(dtype=torch.float64) > slow
    assert count(p=0.1, attend=ATTEND) == count(p=0.1) < slow


@pytest.mark.parametrize("drop", [DROP, lambda x, p: torch.dropout(x, p, True)])
def test_dropout_that_a_script_imports_by_its_name_stores_a_mask_of_bytes(drop):
    def build(drop):
        layer = nn.Linear(64, 256)
        return lambda: drop(layer(torch.randn(512, 64)), 0.1).mean().backward()

    expected = unet3d.estimate_step(partial(build, lambda x, p: F.dropout(x, p))).peak
    assert unet3d.estimate_step(partial(build, drop)).peak == expected


@pytest.mark.parametrize(("layer", "dims"), [(nn.Conv3d, 3), (nn.Conv2d, 2)])
def test_without_cudnn_convolutions_unfold_a_sample(layer, dims):
    def build(enabled):
        network = nn.Sequential(*(layer(8, 8, 3, padding=1) for _ in range(2)))

        def step():
            with torch.backends.cudnn.flags(enabled=enabled):
                network(torch.randn(2, 8, *(24,) * dims)).mean().backward()

        return step

    without, usual = (unet3d.estimate_step(partial(build, on)).peak for on in (False, True))
    columns = 8 * 3**dims * 24**dims * 4
    assert 0.5 * columns < without - usual <= columns


@pytest.mark.parametrize("multiply", [torch.mv, lambda m, v: torch.dot(m[0], v)])
def test_products_with_vectors_have_the_workspace_of_cublas(multiply):
    def build(multiply):
        matrix = nn.Parameter(torch.randn(300, 300))
        return lambda: multiply(matrix, torch.randn(300)).mean().backward()

    plain = unet3d.estimate_step(partial(build, lambda m, v: m * v)).peak
    assert unet3d.estimate_step(partial(build, multiply)).peak > plain + 7 * 2**20


def test_averaged_weights_are_updated_together_on_a_gpu():
    def build(**options):
        network = nn.Linear(512, 512)
        average = torch.optim.swa_utils.AveragedModel(network, **options)
        return lambda: (
            network(torch.randn(1, 512)).mean().backward(),
            average.update_parameters(network),
        )

    together = torch.optim.swa_utils.get_swa_multi_avg_fn()
    expected = unet3d.estimate_step(partial(build, multi_avg_fn=together)).peak
    assert unet3d.estimate_step(build).peak == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_may_validate_in_inference_mode(device):
    def build(mode):
        network = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.Dropout(0.1)
        )

        def step():
            network(torch.randn(1, 1, 8, 8, 8)).mean().backward()
            with mode():
                return float(network(torch.randn(2, 1, 32, 32, 32)).softmax(1).mean())

        return step

    peaks = [
        unet3d.estimate_step(partial(build, mode), device=device).peak
        for mode in (torch.inference_mode, torch.no_grad)
    ]
    assert peaks[0] == peaks[1] > 2 * 2 * 8 * 32**3 * 4


@pytest.mark.parametrize(
    "skips",
    [
        lambda loss: not torch.isfinite(loss),
        lambda loss: not loss.isfinite().all(),
        lambda loss: torch.isnan(loss).any() or loss.isinf().item(),
    ],
)
def test_a_loss_is_finite(skips):
    def build(skips):
        network = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(network.parameters())

        def step():
            loss = network(torch.randn(4, 64)).mean()
            if not skips(loss):
                loss.backward()
                optimizer.step()

        return step

    estimate = unet3d.estimate_step(partial(build, skips), budget_gib=1)
    assert estimate.details.notes == []
    assert estimate.peak == unet3d.estimate_step(partial(build, lambda loss: False)).peak
    never = unet3d.estimate_step(partial(build, lambda loss: True), budget_gib=1)
    assert never.describe_fit().startswith("unknown whether it fits: AdamW made no update in 64")


def test_an_estimate_does_not_depend_on_the_modes_of_its_caller():
    def estimate():
        return unet3d.estimate_step(lambda: loop(make_network()), device="cpu").peak

    expected = estimate()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert estimate() == expected


def test_attention_that_torch_may_fuse_in_evaluation_has_a_note():
    def build(mode):
        teacher = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        student = nn.Linear(16, 16)

        def step():
            x = torch.randn(2, 8, 16)
            with mode():
                target = teacher(x)
            F.mse_loss(student(x), target).backward()

        return step

    notes, none = (
        unet3d.estimate_step(partial(build, mode), device="cpu").details.notes
        for mode in (torch.no_grad, nullcontext)
    )
    names = "MultiheadAttention", "TransformerEncoderLayer"
    assert notes == [f"{name} is estimated without its fused evaluation" for name in names]
    assert none == []


def test_weights_that_a_step_replaces_are_freed():
    def build():
        layer = nn.Linear(1000, 1000, bias=False)
        optimizer, change = torch.optim.SGD(layer.parameters()), torch.zeros(1000, 1000)

        def step():
            layer(torch.randn(1, 1000)).mean().backward()
            layer.weight.data = layer.weight.data - change
            layer.weight.grad = None
            optimizer.step()

        return step

    peaks = {unet3d.estimate_step(build, device="cpu").peak for _ in range(6)}
    assert peaks == {4 * 4 * 1000**2}


def test_adafactor_updates_one_weight_after_the_other_also_on_a_gpu():
    def build(**options):
        network = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        optimizer = torch.optim.Adafactor(network.parameters(), **options)

        def step():
            optimizer.zero_grad()
            network(torch.randn(2, 64)).mean().backward()
            optimizer.step()

        return step

    default, single = (
        unet3d.estimate_step(partial(build, **options)).peak for options in ({}, {"foreach": False})
    )
    assert default == single
