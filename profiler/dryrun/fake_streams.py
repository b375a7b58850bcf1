"""Streams, events and random generators of the faked device."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.profiler.dryrun.clock import Times, VirtualClock
from ebbtide.profiler.dryrun.time_priors import TYPICAL, PriorRange

# A job that asks again and again whether an event has passed waits so long between two questions.
_POLL_NS = PriorRange(2_000, 2_000, 2_000)


class FakeStreams:
    """The classes of streams and events on a clock, and the functions of torch.cuda that use them.

    Attributes:
        stream_class: Stands in for `torch.cuda.Stream`.
        event_class: Stands in for `torch.cuda.Event`.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._count = 0
        self.event_class = _event_class(clock)
        self.stream_class = _stream_class(clock, self._next_number, self.event_class)

    def functions(self) -> dict[str, Any]:
        """Return the replacements of functions and classes of `torch.cuda`."""
        return {
            "Stream": self.stream_class,
            "ExternalStream": self.stream_class,
            "Event": self.event_class,
            "current_stream": lambda *_device: self._stream(self._clock.stream),
            "default_stream": lambda *_device: self._stream(0),
            "set_stream": self._set_stream,
            "stream": _StreamContext,
            "synchronize": lambda *_device: self._clock.synchronize(),
        }

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _stream(self, number: int) -> Any:
        return self.stream_class(number=number)

    def _set_stream(self, stream: Any) -> None:
        if stream is not None:
            self._clock.stream = stream.stream_id


class _StreamContext:
    """Stands in for `torch.cuda.stream(stream)`; None: the current one stays."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def _stream_class(clock: VirtualClock, next_number: Any, event_class: Any) -> Any:
    class FakeStream:
        """A CUDA stream of the dry run; `number` is that of a stream that exists."""

        device_index, device_type, priority = 0, 1, 0

        def __init__(self, *_args: Any, number: int | None = None, **_kwargs: Any) -> None:
            self.stream_id = self.cuda_stream = next_number() if number is None else number
            self.device = torch.device("cuda", 0)
            self._before: list[int] = []

        def __enter__(self) -> FakeStream:
            self._before.append(clock.stream)
            clock.stream = self.stream_id
            return self

        def __exit__(self, *_error: object) -> None:
            clock.stream = self._before.pop()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, FakeStream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(self.stream_id)

        def synchronize(self) -> None:
            clock.synchronize(self.stream_id)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            clock.wait(clock.record(stream.stream_id), self.stream_id)

        def record_event(self, event: Any = None) -> Any:
            event = event or event_class()
            event.record(self)
            return event

        def query(self) -> bool:
            return _has_passed(clock, clock.record(self.stream_id))

    return FakeStream


def _event_class(clock: VirtualClock) -> Any:
    class FakeEvent:
        """A CUDA event on the clock of the dry run."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self.times: Times | None = None

        def record(self, stream: Any = None) -> None:
            self.times = clock.record(None if stream is None else stream.stream_id)

        def wait(self, stream: Any = None) -> None:
            if self.times is not None:
                clock.wait(self.times, None if stream is None else stream.stream_id)

        def synchronize(self) -> None:
            if self.times is not None:
                clock.synchronize_event(self.times)

        def query(self) -> bool:
            return self.times is None or _has_passed(clock, self.times)

        def elapsed_time(self, end: FakeEvent) -> float:
            if self.times is None or end.times is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            return (end.times[TYPICAL] - self.times[TYPICAL]) / 1e6

    return FakeEvent


def _has_passed(clock: VirtualClock, event: Times) -> bool:
    """Return whether the host has reached the time of an event; if not, the host spends some time."""
    if clock.now_ns >= event[TYPICAL]:
        return True
    clock.run_host(_POLL_NS)
    return False


class _GeneratorMeta(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class HostGenerator(torch._C.Generator, metaclass=_GeneratorMeta):  # type: ignore[misc]
    """A random generator, of the host whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


class DeviceGenerator(HostGenerator):
    """A default generator of a device, whose state is that of the functions in `torch.cuda.random`."""

    def get_state(self) -> Any:
        """Return a state of zeros, with the size of a CUDA generator's."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, _state: Any) -> DeviceGenerator:
        """Keep no state, since random numbers of the device are not known."""
        return self
