"""What GPUs can do at most, from their vendors' data sheets."""

from dataclasses import dataclass

ACHIEVED_BANDWIDTH = 0.8
"""Fraction of the memory bandwidth that a kernel which only copies reaches."""


@dataclass(frozen=True, kw_only=True)
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


GPUS = {
    "h200": GpuSpec(
        name="NVIDIA H200",
        half_tflops=989,
        tf32_tflops=495,
        float32_tflops=67,
        bandwidth_tb=4.8,
        conv_efficiency=(0.40, 0.55),
        kernel_us=2.0,
    ),
    "h100": GpuSpec(
        name="NVIDIA H100 SXM",
        half_tflops=989,
        tf32_tflops=495,
        float32_tflops=67,
        bandwidth_tb=3.35,
        conv_efficiency=(0.40, 0.55),
        kernel_us=2.0,
    ),
    "a100": GpuSpec(
        name="NVIDIA A100 80 GB",
        half_tflops=312,
        tf32_tflops=156,
        float32_tflops=19.5,
        bandwidth_tb=2.04,
        conv_efficiency=(0.50, 0.65),
        kernel_us=2.3,
    ),
    "v100": GpuSpec(
        name="NVIDIA V100",
        half_tflops=125,
        tf32_tflops=15.7,
        float32_tflops=15.7,
        bandwidth_tb=0.9,
        conv_efficiency=(0.50, 0.65),
        kernel_us=2.3,
    ),
    "t4": GpuSpec(
        name="NVIDIA T4",
        half_tflops=65,
        tf32_tflops=8.1,
        float32_tflops=8.1,
        bandwidth_tb=0.32,
        conv_efficiency=(0.40, 0.60),
        kernel_us=2.3,
    ),
    "rtx4090": GpuSpec(
        name="NVIDIA GeForce RTX 4090",
        half_tflops=165,
        tf32_tflops=82.6,
        float32_tflops=82.6,
        bandwidth_tb=1.01,
        conv_efficiency=(0.60, 0.75),
        kernel_us=2.0,
    ),
    "rtx3090": GpuSpec(
        name="NVIDIA GeForce RTX 3090",
        half_tflops=71,
        tf32_tflops=35.6,
        float32_tflops=35.6,
        bandwidth_tb=0.94,
        conv_efficiency=(0.60, 0.75),
        kernel_us=2.0,
    ),
}
"""By the name that users type."""
