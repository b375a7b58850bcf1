"""Streams, events and random generators of the faked device."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.profiler.dryrun.clock import VirtualClock


class FakeStream:
    """A stream on which nothing runs."""

    device_index, stream_id, device_type, cuda_stream, priority = 0, 0, 1, 0, 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Return, since nothing runs."""

    def wait_event(self, event: Any) -> None:
        """Return, since nothing runs."""

    def wait_stream(self, stream: Any) -> None:
        """Return, since nothing runs."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        event = event or torch.cuda.Event()
        event.record()
        return event

    def query(self) -> bool:
        """Return True: everything is done."""
        return True


def event_class(clock: VirtualClock) -> type:
    """Return the class of events on a clock."""

    class FakeEvent:
        """A CUDA event on the clock of the dry run."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self.t_ns = clock.now_ns

        def record(self, *_args: Any) -> None:
            self.t_ns = clock.now_ns

        def wait(self, *_args: Any) -> None: ...

        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: FakeEvent) -> float:
            return (end.t_ns - self.t_ns) / 1e6

    return FakeEvent


class _GeneratorMeta(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class HostGenerator(torch._C.Generator, metaclass=_GeneratorMeta):  # type: ignore[misc]
    """A random generator, of the host whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")
