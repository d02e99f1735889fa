"""Which device a run gets, and which precision that device can really do."""

from dataclasses import dataclass

import torch

from unet3d.errors import UsageError

PRECISIONS = {
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
}
"""What users write, and Lightning's name for it."""


def resolve_device(asked: str, key: str = "trainer.accelerator") -> str:
    """Resolve auto, cpu, gpu or cuda to cpu or cuda; `key` is what asked."""
    if asked not in ("auto", "cpu", "gpu", "cuda"):
        raise UsageError(f"{key} must be auto, cpu or gpu, got {asked!r}")
    there = torch.cuda.is_available()
    if asked in ("gpu", "cuda") and not there:
        raise UsageError(f"{key}={asked}: torch {torch.__version__} finds no CUDA device here")
    return "cuda" if there and asked != "cpu" else "cpu"


def has_fast_bf16() -> bool:
    """Whether this CPU has bf16 convolutions; without them one was 190 times slower than fp32."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Precision:
    """What was asked for, what is used (both as users write it), and why they differ."""

    asked: str
    used: str
    why: str = ""

    @property
    def lightning(self) -> str:
        """Lightning's name of what is used."""
        return PRECISIONS[self.used]


def resolve_precision(asked: object, device: str) -> Precision:
    """Resolve `precision=` for a device, openly."""
    name = str(asked)
    if name not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    if device == "cuda":
        if name.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError(f"precision={name}: this GPU has no bf16; use precision=16")
        return Precision(name, name)
    if name == "16-true":
        raise UsageError("precision=16-true needs a GPU (a CPU gave NaN); use 32 or bf16-true")
    if name in ("16", "bf16"):
        if not has_fast_bf16():
            return Precision(name, "32", "this CPU has no fast half-precision convolutions")
        if name == "16":
            return Precision(name, "bf16", "a CPU computes half precision in bf16")
    return Precision(name, name)
