"""What waits for backward waits in the host's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from unet3d.checkpointing.per_level import PerLevelPolicy
from unet3d.errors import UsageError
from unet3d.types import HasRetentionPolicy
from unet3d.units import MIB

LEAVING = 2
"""So many tensors may be on their way out; whoever works waits for the one before them."""


class OffloadActivations:
    """Lean blocks keep by the words of a ladder; of other networks every saved tensor waits there.

    A tensor of less than `least_mib` stays on the GPU: the way would take longer than the work.
    """

    def __init__(self, encoders: Sequence[str], decoders: Sequence[str], least_mib: float = 1):
        if not least_mib >= 0:
            raise UsageError(f"checkpointing.least_mib must be 0 or more, got {least_mib!r}")
        self.policy = PerLevelPolicy(encoders, decoders)
        self.least = least_mib * MIB

    def apply(self, model: nn.Module) -> None:
        """Wrap the network's forward, or tell its lean blocks; names stay."""
        if isinstance(model, HasRetentionPolicy):
            self.policy.apply(model)
            return
        forward = model.forward

        def offloaded(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs)
            stay = {p.untyped_storage()._cdata for p in model.parameters()}
            waiting = _Waiting(self.least, stay)
            with saved_tensors_hooks(waiting.pack, waiting.unpack):
                return forward(*inputs)

        model.forward = offloaded


@dataclass(eq=False)
class _Saved:
    """A tensor that went to the host, and what has come back of it."""

    host: Tensor
    device: torch.device
    before: "_Saved | None"  # was saved just before, so backward will ask for it next
    back: tuple[Tensor, Any] | None = None

    def __del__(self) -> None:
        """What came back for nobody is still being written when its memory is let go."""
        if self.back is not None and self.back[1] is not None:
            torch.cuda.current_stream(self.device).wait_event(self.back[1])


class _Waiting:
    """The saved tensors of one forward; they come back in the opposite order, one ahead.

    They travel on a stream of their own. Memory is let go in the order of the work's own stream, so
    how much is there at a time does not depend on how far the host has run ahead.
    """

    def __init__(self, least: float, stay: set[int]):
        self.least, self.stay = least, stay
        self.last: _Saved | None = None
        self.known: dict[tuple, _Saved] = {}  # a tensor that two nodes save goes out once
        self.leaving: list[tuple[Tensor, Any]] = []
        self.stream: torch.cuda.Stream | None = None

    def pack(self, x: Tensor) -> Any:
        """A tensor's place in the host's memory, or the tensor."""
        dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last_3d)
        if x.nbytes < self.least or x.untyped_storage()._cdata in self.stay or not dense:
            return x
        on_way = [tensor for tensor, _ in self.leaving]
        saved = next((self.known[key] for t in on_way if (key := _key(t)) == _key(x)), None)
        if saved is not None:
            return saved
        pinned = x.is_cuda or isinstance(x, FakeTensor)
        x = x.detach()
        host = torch.empty_like(x, device="cpu", pin_memory=pinned)
        done = self._copy(x, host)
        saved = self.known[_key(x)] = self.last = _Saved(host, x.device, self.last)
        self.leaving.append((x, done))
        while len(self.leaving) > LEAVING:
            self._gone()
        return saved

    def unpack(self, saved: Any) -> Tensor:
        """The tensor; the one that was saved before it sets out as well."""
        if not isinstance(saved, _Saved):
            return saved
        while self.leaving:
            self._gone()
        for wanted in (saved, saved.before):
            if wanted is not None and wanted.back is None:
                block = torch.empty_like(wanted.host, device=wanted.device, pin_memory=False)
                wanted.back = block, self._copy(wanted.host, block)
        assert saved.back is not None
        block, done = saved.back
        saved.back = None
        self._wait(done, block.device)
        return block

    def _gone(self) -> None:
        x, done = self.leaving.pop(0)
        del self.known[_key(x)]
        self._wait(done, x.device)

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

    def _wait(self, done: Any, device: torch.device) -> None:
        if done is not None:
            torch.cuda.current_stream(device).wait_event(done)


def _key(x: Tensor) -> tuple:
    return x.untyped_storage()._cdata, x._version, x.storage_offset(), x.shape, x.stride()
