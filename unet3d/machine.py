"""This machine: the device and the precision of a run, its memory and its cores."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from unet3d.control_groups import count_usable_cores, read_cgroups, read_lines
from unet3d.errors import UsageError
from unet3d.text import MIB, format_bytes, pluralize

CPUINFO, MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")

CUDA_CONTEXT_BYTES = 600 * MIB
"""GPU memory that torch's allocator does not see: CUDA's context and cuDNN's kernels."""

AUTOCAST_TYPES = {"16": torch.float16, "bf16": torch.bfloat16}
"""Types of mixed precision, by the name that users type."""

TRUE_HALF_TYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
"""Types of weights in pure half precision."""


def resolve_device(requested: str, key: str = "trainer.accelerator") -> str:
    """Resolve auto, cpu, cuda, cuda:N or mps to cpu, cuda or mps; `key` names it in messages.

    ROCm's devices are called cuda, too.
    """
    if requested == "mps":
        if not torch.backends.mps.is_available():
            raise UsageError(f"{key}=mps needs a Mac with an Apple GPU: use {key}=cpu")
        return "mps"
    kind, _, index = requested.partition(":")
    has_gpu = torch.cuda.is_available()
    if kind == "cuda" and not has_gpu:
        raise UsageError(
            f"{key}={requested}: torch {torch.__version__} finds no CUDA device: use "
            f"{key}=cpu, or run unet3d doctor to see why"
        )
    if index and int(index) >= torch.cuda.device_count():
        count = pluralize(torch.cuda.device_count(), "GPU")
        raise UsageError(f"{key}={requested}: torch finds {count}, and counts them from 0")
    return "cuda" if has_gpu and requested != "cpu" else "cpu"


def select_gpu(requested: str) -> None:
    """Make the GPU of cuda:N the one that all of this process uses; do nothing for other devices.

    Where there is no GPU, a step can still be estimated.
    """
    if requested.startswith("cuda:") and torch.cuda.is_available():
        resolve_device(requested)
        torch.cuda.set_device(int(requested.partition(":")[2]))


def describe_missing_kernels(device: str) -> str | None:
    """Say what a device runs without; None: nothing."""
    if device == "mps":
        return (
            "trainer.accelerator=mps: plain PyTorch modules in float32, without fused blocks, "
            "kernels for poolings, and memory by phase"
        )
    if device == "cuda" and torch.version.hip is not None:
        return (
            "ROCm: poolings and fused blocks run in plain PyTorch, slowly; "
            "checkpointing=none is faster"
        )
    return None


def has_fast_bf16() -> bool:
    """Return whether this CPU has bf16 convolutions; emulation was 190 times slower than fp32."""
    # torch for Apple's CPUs has no oneDNN, nor its operators.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Precision:
    """The requested and the used precision, as users write them, and why they differ."""

    requested: str
    used: str
    reason: str = ""


def resolve_precision(name: str, device: str) -> Precision:
    """Resolve `precision=` to what a device supports, with the reason if that differs."""
    if device == "mps":
        reason = "half precision is not supported on Apple GPUs"
        return Precision(name, "32", "" if name == "32" else reason)
    if device == "cuda":
        if name.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError(f"precision={name}: this GPU does not support bf16; use precision=16")
        return Precision(name, name)
    if name == "16-true":
        raise UsageError(
            "precision=16-true needs a GPU (fp16 training on a CPU produces NaN); use 32 or "
            "bf16-true"
        )
    if name in ("16", "bf16"):
        if not has_fast_bf16():
            return Precision(name, "32", "this CPU has no fast half-precision convolutions")
        if name == "16":
            return Precision(name, "bf16", "a CPU computes half precision in bf16")
    return Precision(name, name)


def get_available_bytes(device: torch.device) -> int | None:
    """Return what this process may take of a GPU, or the RAM that is still available.

    Of a GPU that is what it already holds, its CUDA context included, and what is free: other
    processes and a screen hold the rest. None: unknown.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES)
    known = [max(0, limit - used) for limit, used in read_cgroups()]
    if "MemAvailable" in (memory := read_meminfo()):
        known.append(memory["MemAvailable"])
    return min(known, default=None)


def read_meminfo(file: Path = MEMINFO) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty where it does not exist."""
    fields = [line.split() for line in read_lines(file)]
    return {name.rstrip(":"): int(number) * 1024 for name, number, *unit in fields if unit}


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes that a GPU has left for tensors, counting torch's cache as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def summarize_machine() -> dict[str, str]:
    """Return system, processor, memory and GPUs for people to read; no names of users or hosts."""
    memory = read_meminfo().get("MemTotal")
    facts = {
        "system": platform.platform(),
        "processor": f"{get_cpu_model() or 'unknown'}, {count_usable_cores()} usable cores",
        "memory": None if memory is None else format_bytes(memory),
        "GPU": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        "CUDA": torch.version.cuda,
    }
    return {name: fact for name, fact in facts.items() if fact}


def get_cpu_model() -> str | None:
    """Return the model name of the CPU."""
    lines = [line for line in read_lines(CPUINFO) if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.processor() or None
