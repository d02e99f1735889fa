"""What a trace records: blocks of memory, and the calls of modules that allocate them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """One allocation; `allocated_at` and `freed_at` are events, `freed_at` is None until then."""

    id: int
    nbytes: int
    phase: str
    path: str  # of the module that allocated it
    op: str
    allocated_at: int
    kind: str | None = None  # where it is known at once: parameters, input, ...
    freed_at: int | None = None


@dataclass(frozen=True, slots=True)
class EventRange:
    """A range of events: the call of a module, or a phase."""

    name: str
    type: str
    phase: str
    start: int
    stop: int


@dataclass(slots=True)
class OpenCall:
    """The call of a module that has not returned."""

    path: str
    start: int  # event
    first_node: int  # sequence number of autograd's next node
    is_leaf: bool = True  # called no other module
