"""Measure what torch allocates on a CPU."""

from collections.abc import Callable
from itertools import accumulate

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def measure_peak_bytes(action: Callable[[], object]) -> int:
    """Return the peak of the bytes allocated while the action runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    assert profiler.profiler is not None
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    events = []
    while tree:
        event = tree.pop()
        tree += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(accumulate(size for _, size in sorted(events)))
