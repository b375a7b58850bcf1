"""Streams and events of CUDA on the clock of a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch.cuda._utils import _get_device_index as get_device_index

from ebbtide.features.dryrun.time.clock import DEVICE_STREAMS, Times, VirtualClock
from ebbtide.machines.kernels.time_priors import TYPICAL, PriorRange

# A job that asks again and again whether an event has passed waits so long between two
# questions.
_POLL_NS = PriorRange(2_000, 2_000, 2_000)


def stream_functions(clock: VirtualClock) -> dict[str, Any]:
    """Return the classes of streams and events on a clock, and the functions of
    `torch.cuda` that use them."""
    event_class = type("FakeEvent", (FakeEvent,), {"clock": clock})
    members = {"clock": clock, "numbers": count(1), "event": event_class}
    stream_class: Any = type("FakeStream", (FakeStream,), members)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            clock.device, clock.stream = stream.device_index, stream.stream_id

    def current(device: Any = None) -> Any:
        index = get_device_index(device, optional=True)
        return stream_class(number=clock.stream_of(index))

    def default(device: Any = None) -> Any:
        index = get_device_index(device, optional=True)
        return stream_class(number=index * DEVICE_STREAMS)

    return {
        "Stream": stream_class,
        "ExternalStream": stream_class,
        "Event": event_class,
        "current_stream": current,
        "default_stream": default,
        "set_stream": set_stream,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "synchronize": lambda *_device, **_kwargs: clock.synchronize(),
    }


class FakeStream:
    """A CUDA stream of a clock; `number`: the number of a stream that exists."""

    clock: VirtualClock
    numbers: Iterator[int]
    event: type[FakeEvent]
    device_type, priority = 1, 0

    def __init__(
        self, device: Any = None, *_args: Any, number: int | None = None, **_kwargs: Any
    ) -> None:
        if number is None:
            index = get_device_index(device, optional=True)
            number = index * DEVICE_STREAMS + next(self.numbers)
        self.stream_id = self.cuda_stream = number
        self.device_index = number // DEVICE_STREAMS
        self.device = torch.device("cuda", self.device_index)
        self._before: list[tuple[int, int]] = []

    def __enter__(self) -> FakeStream:
        clock = self.clock
        self._before.append((clock.device, clock.stream_of(self.device_index)))
        clock.device, clock.stream = self.device_index, self.stream_id
        return self

    def __exit__(self, *_error: object) -> None:
        self.clock.device, self.clock.stream = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def synchronize(self) -> None:
        self.clock.synchronize(self.stream_id)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.clock.wait(self.clock.record(stream.stream_id), self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = event or self.event()
        event.record(self)
        return event

    def query(self) -> bool:
        return _has_passed(self.clock, self.clock.record(self.stream_id))

    def is_capturing(self) -> bool:
        return False


class FakeEvent:
    """A CUDA event on a clock."""

    clock: VirtualClock

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.times: Times | None = None

    def record(self, stream: Any = None) -> None:
        self.times = self.clock.record(None if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        if self.times is not None:
            self.clock.wait(self.times, None if stream is None else stream.stream_id)

    def synchronize(self) -> None:
        if self.times is not None:
            self.clock.synchronize_event(self.times)

    def query(self) -> bool:
        return self.times is None or _has_passed(self.clock, self.times)

    def elapsed_time(self, end: FakeEvent) -> float:
        if self.times is None or end.times is None:
            raise RuntimeError(
                "Both events must be recorded before calculating elapsed time."
            )
        return (end.times[TYPICAL] - self.times[TYPICAL]) / 1e6


def _has_passed(clock: VirtualClock, event: Times) -> bool:
    """Return whether the host has reached the time of an event; if not, the host spends
    some time."""
    if clock.now_ns >= event[TYPICAL]:
        return True
    clock.run_host(_POLL_NS)
    return False
