"""Record work on a GPU as CUDA graphs: the host replays one with a single call."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from unet3d.peak_memory import MemoryRecord


class CapturedGraph(NamedTuple):
    """A recorded graph."""

    tensors: Any  # where each replay writes its results
    replay: Callable[[], None]
    peak: MemoryRecord


class CudaGraphs:
    """Records CUDA graphs on a stream of their own; they share one memory pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.MemPool()
        self.stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], Any]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats(self.device)
        pool = cast(Any, self.pool.id)
        # thread_local: the thread that pins batches allocates memory at any time.
        with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
            tensors = work()
        peak = MemoryRecord(allocated=torch.cuda.max_memory_allocated(self.device))
        return CapturedGraph(tensors, graph.replay, peak)

    @contextmanager
    def use_memory(self) -> Generator[None]:
        """Allocate from the graphs' pool, whose blocks belong to their stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool, self.device):
            yield
        current.wait_stream(self.stream)
