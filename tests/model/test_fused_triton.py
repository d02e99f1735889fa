"""The Triton kernels of fused blocks without a GPU: interpreted, and compiled for sm_90."""

import pytest
import torch
from torch import Tensor

from unet3d.model.fused.kernels import cuda
from unet3d.model.fused.ops.upsample_ops import interpolate_gradient
from unet3d.triton_kernels import OPTIONS

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_pytorch(run_interpreted):
    run_interpreted("tests.model.helpers.interpreted")


def test_the_estimate_knows_what_the_upsampling_kernel_allocates(monkeypatch):
    monkeypatch.setattr(cuda, "launch", lambda *arguments, **constants: None)
    sizes, empty = [], torch.empty

    def count(*arguments, **options):
        result = empty(*arguments, **options)
        sizes.append(result.numel() * result.element_size())
        return result

    monkeypatch.setattr(torch, "empty", count)
    g, low = torch.zeros(2, 3, 4, 6, 8), torch.zeros(2, 3, 2, 3, 4)
    axes = [0, 4, 0, 2, 0, 6, 0, 3, 0, 8, 0, 4]
    cuda.interpolate_gradient(g, axes, True, low)
    assert sizes == interpolate_gradient.list_temporaries(g, axes, True, low)


class CompileOnly:
    """Stands in for a kernel: compiles it for the arguments of a launch instead of launching it."""

    count = 0

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile_kernel(*arguments, **constants):
            import triton
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource

            options = {name: constants.pop(name) for name in OPTIONS}
            signature, constexprs = {}, dict(constants)
            by_name = dict(zip((p.name for p in self.kernel.params), arguments, strict=False))
            for name in (p.name for p in self.kernel.params):
                value = by_name.get(name)
                if name in constants or value == 1 if not isinstance(value, Tensor) else False:
                    signature[name] = "constexpr"
                    constexprs.setdefault(name, value)
                elif isinstance(value, Tensor):
                    signature[name] = POINTERS[value.dtype]
                else:
                    signature[name] = "fp32" if isinstance(value, float) else "i32"
            source = ASTSource(self.kernel, signature, constexprs)
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            CompileOnly.count += 1

        return compile_kernel


@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("shape", [(2, 64, 8, 15, 26), (1, 1, 4, 1, 7)], ids=str)
def test_every_kernel_compiles(shape, dtype, monkeypatch):
    from unet3d.model.fused.kernels import triton

    for name in [n for n in vars(triton) if n.endswith("_kernel")]:
        monkeypatch.setattr(triton, name, CompileOnly(getattr(triton, name)))
    y = torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last_3d)
    numbers = [torch.zeros(shape[:2]) for _ in range(4)]
    sums = torch.zeros(2, *shape[:2])
    before = CompileOnly.count
    cuda.add_moments(y, 0, sums)
    cuda.normalize(y, numbers[0], numbers[1], 0.01, False, y)
    cuda.normalize(y, numbers[0], numbers[1], 0.01, True, y)
    cuda.activation_gradient(y, 0.01, y)
    cuda.add_gradient_sums(y, y, *numbers, slope=0.01, first=True, sums=sums)
    cuda.gradient(y, y, *numbers, slope=0.01, out=y)
    d, h, w = (2 * n for n in shape[2:])
    up = torch.zeros(*shape[:2], d, h, w, dtype=dtype).contiguous(
        memory_format=torch.channels_last_3d
    )
    for linear in (True, False):
        axes = [0, d, 0, shape[2], 0, h, 0, shape[3], 0, w, 0, shape[4]]
        cuda.interpolate(y, axes, linear, up)
        cuda.interpolate_gradient(up, axes, linear, y)
    for groups, over_batch in ((shape[1], True), (shape[1], False), (1, False)):
        running = (sums[0, 0], sums[1, 0]) if over_batch else (None, None)
        norm = (numbers[0][0], numbers[1][0], numbers[2][0], *running)
        out = torch.zeros(4, *shape[:2])
        arguments = (sums, 9, groups, over_batch, 1e-5, *norm)
        cuda.fold_statistics(*arguments, momentum=0.1, out=out)
        cuda.fold_gradient(sums, *numbers[:3], 9, groups, over_batch, sums)
    assert CompileOnly.count - before == 22
