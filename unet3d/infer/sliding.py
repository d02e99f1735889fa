"""A whole volume through the network, window by window (MONAI's sliding window)."""

from collections.abc import Callable, Sequence

from torch import Tensor

from unet3d.types import Misuse


class SlidingWindow:
    """Overlapping windows of `patch_size`, blended with gaussian weights."""

    def __init__(self, patch_size: Sequence[int], *, overlap: float = 0.5, batch_size: int = 1):
        if not 0 <= overlap < 1 or batch_size < 1:
            raise Misuse(
                "infer needs overlap in 0..1 (1 excluded) and batch_size >= 1, "
                f"got {overlap} and {batch_size}"
            )
        self.patch_size = tuple(patch_size)
        self.overlap = overlap
        self.batch_size = batch_size

    def __call__(self, image: Tensor, network: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        from monai.inferers.utils import sliding_window_inference

        logits = sliding_window_inference(
            image,
            roi_size=self.patch_size,
            sw_batch_size=self.batch_size,
            predictor=network,
            overlap=self.overlap,
            mode="gaussian",
        )
        assert isinstance(logits, Tensor)
        return logits
