"""Compare estimates of everyday training steps, and of others' networks, with real CPU steps.

    python -m scripts.bench.any_step      # minutes

Everyday steps are those of tests/memory/test_any_step.py; their peaks are those of torch's profiler
(tests/memory/helpers/oracle.py). Peers estimate the same steps: torch's MemTracker, which follows a
real step, and the formula of many calculators: weights, their gradients and optimizer state.
Networks are those of the packages that are installed, in a loop with AdamW and the mean of the
outputs; their peaks count all tensors (tests/contract/helpers/allocated.py), or are those of the
profiler where they differ: a count sees gradients that autograd adds in place as if it copied them.
"""

import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from time import process_time
from typing import Any

import torch
from torch import nn

from scripts.bench.results import make_parser, write_results
from tests.contract.helpers.allocated import AllocatedBytes
from tests.memory.helpers.oracle import measure_script
from tests.memory.test_any_step import STEPS
from unet3d.memory.any_network import sum_means
from unet3d.memory.any_step import estimate_step

Build = Callable[[], Callable[[], Any]]

CUBE, LARGER_CUBE, IMAGE = (2, 1, 32, 32, 32), (2, 1, 64, 64, 64), (2, 3, 64, 64)
VOLUMES = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
FEATURES = {"features": (4, 4, 8, 16, 16, 4)}
MONAI: dict[str, dict[str, Any]] = {
    "AttentionUnet": VOLUMES | {"channels": (4, 8, 16), "strides": (2, 2)},
    "AutoEncoder": VOLUMES | {"channels": (4, 8), "strides": (2, 2)},
    "BasicUNet": VOLUMES | FEATURES,
    "BasicUNetPlusPlus": VOLUMES | FEATURES,
    "DenseNet121": VOLUMES | {"init_features": 8, "growth_rate": 4},
    "DynUNet": VOLUMES
    | {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
    "EfficientNetBN": {
        "model_name": "efficientnet-b0",
        "pretrained": False,
        "spatial_dims": 3,
        "in_channels": 1,
    },
    "FlexibleUNet": {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0"},
    "HighResNet": VOLUMES,
    "MedNeXt": {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "init_filters": 4},
    "ResNet": {
        "block": "basic",
        "layers": [1, 1, 1, 1],
        "block_inplanes": [4, 8, 8, 16],
        "spatial_dims": 3,
        "n_input_channels": 1,
    },
    "SEResNet50": {"spatial_dims": 3, "in_channels": 1},
    "SegResNet": VOLUMES | {"init_filters": 8},
    "SegResNetDS": VOLUMES | {"init_filters": 4, "blocks_down": (1, 1, 1)},
    "SegResNetVAE": VOLUMES | {"init_filters": 8, "input_image_size": (32, 32, 32)},
    "SENet154": {"spatial_dims": 3, "in_channels": 1},
    "SwinUNETR": {"in_channels": 1, "out_channels": 2, "feature_size": 12},
    "UNet": VOLUMES | {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 2},
    "UNETR": {"in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 4},
    "ViT": {"in_channels": 1, "img_size": 32, "patch_size": 8, "num_layers": 2},
    "VNet": {"spatial_dims": 3, "in_channels": 1, "out_channels": 2},
}
TORCHVISION = """alexnet vgg11 vgg16_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2
squeezenet1_1 densenet121 mnasnet0_5 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x1_0
efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny vit_b_32 swin_t swin_v2_t
maxvit_t segmentation.fcn_resnet50 segmentation.deeplabv3_resnet50
segmentation.lraspp_mobilenet_v3_large video.r3d_18 video.mc3_18 video.r2plus1d_18""".split()
TIMM = """resnet18 resnetv2_50 efficientnet_b0 tf_efficientnetv2_b0 mobilenetv3_small_100
convnext_atto convnextv2_atto vit_tiny_patch16_224 deit_tiny_patch16_224
swin_tiny_patch4_window7_224 mixer_b16_224 gmlp_ti16_224 coatnet_nano_rw_224
maxvit_nano_rw_256 regnety_002 hrnet_w18_small""".split()
HUGGING_FACE = {
    "Bert": {"num_hidden_layers": 2},
    "GPT2": {"n_layer": 2},
    "Llama": {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256},
    "T5Encoder": {"num_layers": 2},
    "Roberta": {"num_hidden_layers": 2},
    "DistilBert": {"n_layers": 2},
    "OPT": {"num_hidden_layers": 2},
    "Qwen2": {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256},
}


def list_networks() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]]]:
    """Yield names, what makes the networks, and what makes their inputs."""
    monai = import_module("monai.networks.nets")
    for name, options in MONAI.items():
        size = {"FlexibleUNet": IMAGE, "SwinUNETR": LARGER_CUBE}.get(name, CUBE)
        yield f"MONAI {name}", partial(getattr(monai, name), **options), partial(torch.randn, size)
    unets = import_module("dynamic_network_architectures.architectures.unet")
    for name in ("PlainConvUNet", "ResidualEncoderUNet"):
        for dims in (2, 3):
            conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
            sizes = (3 if dims == 2 else 1, 3, [4, 8, 16], conv, 3, [1, 2, 2], [1, 2, 2], 3, [1, 1])
            options = {"norm_op": norm, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU}
            make = partial(getattr(unets, name), *sizes, **options, deep_supervision=dims == 3)
            size = IMAGE if dims == 2 else CUBE
            yield f"nnU-Net {name}, {dims}D", make, partial(torch.randn, size)
    wolny = import_module("pytorch3dunet.unet3d.model")
    for name in ("UNet3D", "ResidualUNet3D", "ResidualUNetSE3D"):
        options = {"f_maps": 8, "num_groups": 4, "num_levels": 3, "is_segmentation": False}
        make = partial(getattr(wolny, name), 1, 2, final_sigmoid=False, **options)
        yield f"pytorch-3dunet {name}", make, partial(torch.randn, CUBE)
    try:
        models = import_module("torchvision.models")
        for name in TORCHVISION:
            size = (1, 3, 4, 32, 32) if "video" in name else (2, 3, 224, 224)
            options = {"weights": None, "weights_backbone": None}
            make = getattr(
                import_module(f"{models.__name__}.{name}".rpartition(".")[0]),
                name.rpartition(".")[2],
            )
            options = {k: v for k, v in options.items() if k == "weights" or "segmentation" in name}
            yield f"torchvision {name}", partial(make, **options), partial(torch.randn, size)
        timm = import_module("timm")
        for name in TIMM:
            size = 256 if "256" in name else 224
            yield (
                f"timm {name}",
                partial(timm.create_model, name),
                partial(torch.randn, 2, 3, size, size),
            )
        transformers = import_module("transformers")
        for name, options in HUGGING_FACE.items():
            config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")
            model = getattr(transformers, f"{name}Model")
            make = partial(
                lambda model, config, options: model(config(**options)), model, config, options
            )
            yield f"transformers {name}", make, partial(torch.randint, 0, 100, (2, 64))
    except ModuleNotFoundError as missing:
        print(missing)


def build_loop(make: Callable[[], nn.Module], make_batch: Callable[[], torch.Tensor]) -> Any:
    """Return a step of a network's loop that keeps its outputs."""
    network = make().train()
    optimizer = torch.optim.AdamW(network.parameters())

    def step() -> None:
        optimizer.zero_grad()
        outputs = network(make_batch())
        outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
        loss = sum_means(outputs)
        loss.backward()
        optimizer.step()

    return step


def count(build: Build) -> int:
    """Return the largest size of all tensors in the second step."""
    with AllocatedBytes() as allocated:
        step = build()
        step()
        allocated.peak = allocated.current
        step()
    return allocated.peak


def estimate(build: Build, measured: int) -> dict[str, Any]:
    """Return the estimate, its error in bytes and its seconds, or why there is none."""
    start = process_time()
    try:
        peak = estimate_step(build, device="cpu").peak
    except ValueError as reason:
        return {"refused": str(reason).replace(str(inspect.getfile(torch)), "torch")[:300]}
    return {
        "estimated": peak,
        "error": peak - measured,
        "seconds": round(process_time() - start, 2),
    }


def find_made() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return the networks and the optimizers that are alive."""
    objects = gc.get_objects()
    modules = [x for x in objects if issubclass(type(x), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [x for x in modules if id(x) not in inner and any(True for _ in x.parameters())]
    return roots, [x for x in objects if issubclass(type(x), torch.optim.Optimizer)]


def ask_peers(build: Build, measured: int) -> dict[str, Any]:
    """Return the errors in bytes of others' estimates, or why there is none."""
    from torch.distributed._tools.mem_tracker import MemTracker

    gc.collect()
    step = build()
    modules, optimizers = find_made()
    try:
        tracker = MemTracker()
        tracker.track_external(*modules, *optimizers)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        peak = max(x["Total"] for x in tracker.get_tracker_snapshot("peak").values())
        tracked: Any = peak - measured
    except Exception as error:
        tracked = type(error).__name__
    trained = [p for m in modules for p in m.parameters() if p.requires_grad]
    weights = sum(p.nbytes for m in modules for p in m.parameters())
    state = sum(
        x.nbytes
        for o in optimizers
        for s in o.state.values()
        for x in s.values()
        if isinstance(x, torch.Tensor)
    )
    formula = weights + sum(p.nbytes for p in trained) + state
    return {"MemTracker": tracked, "formula": formula - measured}


def main() -> None:
    arguments = make_parser(
        "scripts.bench.any_step", __doc__, output="any-step-cpu.json"
    ).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps, networks = {}, {}
    for name, build in STEPS.items():
        torch.manual_seed(0)
        measured = measure_script(build).peak
        steps[name] = {"measured": measured} | estimate(build, measured)
        steps[name] |= ask_peers(build, measured)
        print(name, steps[name], flush=True)
    for name, make, make_batch in list_networks():
        build = partial(build_loop, make, make_batch)
        try:
            measured = count(build)
        except Exception as error:
            print(name, "does not run here:", repr(error)[:150])
            continue
        row = estimate(build, measured)
        if row.get("error") and (profiled := measure_script(build).peak) == row["estimated"]:
            measured, row["error"] = profiled, 0
        networks[name] = {"measured": measured} | row
        print(name, networks[name], flush=True)
        gc.collect()
    write_results(arguments.output, {"steps": steps, "networks": networks})


if __name__ == "__main__":
    main()
