"""What GPUs can do at most, from their vendors' data sheets."""

from dataclasses import dataclass

ACHIEVED_BANDWIDTH = 0.8
"""Fraction of the memory bandwidth that a kernel which only copies reaches."""


@dataclass(frozen=True)
class GpuSpec:
    """Peak rates of a GPU without sparsity, and what convolutions reach of them."""

    name: str
    half_tflops: float  # float16 or bfloat16 with sums in float32
    tf32_tflops: float  # equal to float32 where the GPU has no TF32
    float32_tflops: float
    bandwidth_tb: float  # TB/s of its memory
    conv_efficiency: tuple[float, float]  # lower and upper fraction of the peak rate
    kernel_us: float  # the least time of a kernel

    def get_tflops(self, *, is_half: bool, tf32: bool) -> float:
        """Return the peak rate of convolutions."""
        if is_half:
            return self.half_tflops
        return self.tf32_tflops if tf32 else self.float32_tflops


# fmt: off
GPUS = {  # half, TF32, float32 TFLOP/s; TB/s; efficiency of convolutions; us
    "h200": GpuSpec("NVIDIA H200", 989, 495, 67, 4.8, (0.40, 0.55), 2.0),
    "h100": GpuSpec("NVIDIA H100 SXM", 989, 495, 67, 3.35, (0.40, 0.55), 2.0),
    "a100": GpuSpec("NVIDIA A100 80 GB", 312, 156, 19.5, 2.04, (0.50, 0.65), 2.3),
    "v100": GpuSpec("NVIDIA V100", 125, 15.7, 15.7, 0.9, (0.50, 0.65), 2.3),
    "t4": GpuSpec("NVIDIA T4", 65, 8.1, 8.1, 0.32, (0.40, 0.60), 2.3),
    "rtx4090": GpuSpec("NVIDIA GeForce RTX 4090", 165, 82.6, 82.6, 1.01, (0.60, 0.75), 2.0),
    "rtx3090": GpuSpec("NVIDIA GeForce RTX 3090", 71, 35.6, 35.6, 0.94, (0.60, 0.75), 2.0),
}
# fmt: on
"""By the name that users type."""
