"""Format the model of a step's time as a table and as JSON."""

from typing import Any

from unet3d.roofline.step_time import StepTimeModel
from unet3d.text import format_columns

ASSUMPTIONS = (
    "A model, not a measurement: operations one after another, each limited by FLOPs, bytes or the "
    "least time of a kernel; no caches, no waiting for data."
)


def format_step_time(model: StepTimeModel) -> str:
    """Format one row per kind of operation, and what limits the step."""
    rows = [("modeled time of a step", "GPU ms", "launches", "TFLOP", "GB")]
    for kind, part in model.parts.items():
        rows.append((f"  {kind}", *_numbers(part.gpu_ms, part.launches, part.flops, part.nbytes)))
    total = _numbers(model.gpu_ms, model.launches, model.flops, model.nbytes)
    rows.insert(1, (f"on {model.gpu.name}", *total))
    fast, slow = model.gpu_ms_range
    efficiencies = [f"{100 * e:.0f}" for e in model.gpu.conv_efficiency]
    limit = "host" if model.host_ms > model.gpu_ms else "GPU"
    return "\n\n".join(
        [
            format_columns(rows),
            f"GPU: {fast:.0f} to {slow:.0f} ms, where convolutions reach {efficiencies[1]}% to "
            f"{efficiencies[0]}% of {model.gpu.half_tflops:g} TFLOP/s in half precision; host: "
            f"{model.host_ms:.0f} ms to launch. The {limit} limits the step.",
            ASSUMPTIONS,
        ]
    )


def step_time_to_dict(model: StepTimeModel) -> dict[str, Any]:
    """Return the model as JSON-compatible values."""
    fast, slow = model.gpu_ms_range
    return {
        "gpu": model.gpu.name,
        "launches": model.launches,
        "flops": model.flops,
        "bytes": model.nbytes,
        "gpu_ms": model.gpu_ms,
        "gpu_ms_range": [fast, slow],
        "host_ms": model.host_ms,
        "step_ms": model.step_ms,
        "parts": {
            kind: {
                "launches": part.launches,
                "flops": part.flops,
                "bytes": part.nbytes,
                "gpu_ms": part.gpu_ms,
            }
            for kind, part in model.parts.items()
        },
        "assumptions": ASSUMPTIONS,
    }


def _numbers(gpu_ms: float, launches: int, flops: int, nbytes: int) -> tuple[str, ...]:
    return f"{gpu_ms:.1f}", f"{launches:,}", f"{flops / 1e12:.2f}", f"{nbytes / 1e9:.1f}"
