"""Compile the kernels of a step for sm_90, without a GPU; nothing may be left to compile then."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from unet3d.config.compose import compose_config
from unet3d.machine import Precision
from unet3d.memory.estimate import list_launches
from unet3d.memory.step.training_step import make_step_factory
from unet3d.training.config import parse_train_config
from unet3d.triton_kernels import compile_kernel, compile_kernels

compiled = []
original = JITFunction._do_compile


def compile_and_count(self, *arguments):
    compiled.append(self.fn.__name__)
    return original(self, *arguments)


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    torch.cuda.device = lambda device: nullcontext()
    JITFunction._do_compile = compile_and_count
    words = ["model=unet_tiny", "pool=median", "data.num_classes=3", "precision=16"]
    settings = parse_train_config(compose_config(words, "train"))
    launches = list_launches(make_step_factory(settings.step, Precision("16", "16"), cuda=True))
    count = compile_kernels(launches, torch.device("cuda"), threads=2)
    assert count == len(compiled) > 10, (count, compiled)
    compiled.clear()
    for launch in launches:
        compile_kernel(launch)
    assert not compiled, compiled


if __name__ == "__main__":
    main()
