"""Offload what autograd saves for backward to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from unet3d.checkpointing.per_level import PerLevelStrategy
from unet3d.errors import UsageError
from unet3d.text import MIB
from unet3d.types import HasRetention

MAX_IN_FLIGHT = 2
"""Copies to the host that may be pending; the working stream waits for earlier ones."""


class OffloadActivations(PerLevelStrategy):
    """Set the retention of fused blocks; in other networks, offload every saved tensor.

    In other networks tensors smaller than `min_mib` stay on the GPU: copying them would take
    longer than the work.
    """

    def __init__(
        self,
        encoders: Sequence[str],
        decoders: Sequence[str],
        tile_mib: float | str = "auto",
        min_mib: float = 1,
        residual_encoders: Sequence[str] | None = None,
    ):
        if not min_mib >= 0:
            raise UsageError(f"checkpointing.min_mib must be 0 or more, got {min_mib!r}")
        super().__init__(encoders, decoders, tile_mib, residual_encoders=residual_encoders)
        self.min_bytes = min_mib * MIB

    def apply(self, model: nn.Module) -> None:
        """Wrap the network's forward, or set the retention of fused blocks; names do not change."""
        if isinstance(model, HasRetention):
            super().apply(model)
            return
        forward = model.forward

        def forward_with_offload(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs)
            parameters = {p.untyped_storage()._cdata for p in model.parameters()}
            offloader = _Offloader(self.min_bytes, parameters)
            with saved_tensors_hooks(offloader.pack, offloader.unpack):
                return forward(*inputs)

        model.forward = forward_with_offload


@dataclass(eq=False)
class _Saved:
    """A tensor on the host, and its copy back, once that is queued."""

    host: Tensor
    device: torch.device
    previous: "_Saved | None"  # saved just before, so backward needs it next
    prefetched: tuple[Tensor, Any] | None = None  # copy on the device, event

    def take(self) -> Tensor | None:
        """Wait for the copy on the device, if there is one, and return it."""
        if self.prefetched is None:
            return None
        (block, done), self.prefetched = self.prefetched, None
        _wait(done, self.device)
        return block

    def __del__(self) -> None:
        """Wait for a copy that nobody has read before its memory is freed."""
        self.take()


class _Offloader:
    """Offloads the saved tensors of one forward, and prefetches them in reverse order, one ahead.

    Copies run on a stream of their own. Memory is freed in the order of the working stream, so how
    much is in use does not depend on how far the CPU has run ahead of the GPU.
    """

    def __init__(self, min_bytes: float, parameters: set[int]):
        self.min_bytes, self.parameters = min_bytes, parameters  # storages that stay on the device
        self.last: _Saved | None = None
        self.in_flight: dict[tuple, tuple[Tensor, Any, _Saved]] = {}  # by view, to copy it once
        self.stream: torch.cuda.Stream | None = None

    def pack(self, x: Tensor) -> Any:
        """Start to offload a tensor; return its record, or the tensor itself if it stays."""
        storage = x.untyped_storage()._cdata
        dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last_3d)
        if x.nbytes < self.min_bytes or storage in self.parameters or not dense:
            return x
        key = storage, x._version, x.storage_offset(), x.shape, x.stride()
        if key in self.in_flight:
            return self.in_flight[key][2]
        pinned = x.is_cuda or isinstance(x, FakeTensor)
        x = x.detach()
        host = torch.empty_like(x, device="cpu", pin_memory=pinned)
        done = self._copy(x, host)
        saved = self.last = _Saved(host, x.device, self.last)
        self.in_flight[key] = x, done, saved
        while len(self.in_flight) > MAX_IN_FLIGHT:
            self._release_oldest()
        return saved

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor on the device, and prefetch the one that was saved before it."""
        if not isinstance(saved, _Saved):
            return saved
        while self.in_flight:
            self._release_oldest()
        for record in (saved, saved.previous):
            if record is not None and record.prefetched is None:
                block = torch.empty_like(record.host, device=record.device, pin_memory=False)
                record.prefetched = block, self._copy(record.host, block)
        block = saved.take()
        assert block is not None
        return block

    def _release_oldest(self) -> None:
        x, done, _ = self.in_flight.pop(next(iter(self.in_flight)))
        _wait(done, x.device)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        device = source.device if source.is_cuda else target.device
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()


def _wait(done: Any, device: torch.device) -> None:
    """Let the working stream wait for a copy, if that runs on another one."""
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
