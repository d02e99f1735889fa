"""Compile a Triton kernel for sm_90, without a GPU, and count its instructions."""

import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARPS = 4
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.uint32: "*u32",
    torch.int64: "*i64",
}


def count_instructions_per_lane(kernel, arguments: dict) -> float:
    """Count the instructions per lane for these arguments; loops are unrolled, so all run."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [disassembler, "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    lines = [line for line in text.splitlines() if line.strip().startswith("/*")]
    idle = sum("NOP" in line or "BRA `(.L" in line for line in lines)
    return (len(lines) - idle) / (arguments["BLOCK"] / (32 * WARPS))
