"""Measures copies between host and GPU. Needs a GPU; the arithmetic on event times does
not."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ebbtide.features.calibrate.cpu import record_traffic
from ebbtide.features.calibrate.record import (
    MeasurementRecord,
    Setup,
    Timing,
    measure_time,
)

DIRECTIONS = ("h2d", "d2h")
# A power of two: torch rounds pinned memory up to one, so this is pinned exactly.
COPY_BYTES = 256 << 20
_MIN_COPIES = 5
# Copies per call during updates: enough to keep the link busy, few enough to stop soon.
_BATCH_COPIES = 4

# Times of the copies of one direction in ms: of the start, then of the end of each
# copy.
CopyTimes = Sequence[float]


class LinkProbe:
    """Buffers and streams to copy over the link of one CUDA device.

    Buffers are pinned and on the device, and there is a stream per direction.
    """

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device):
            self._device = device
            self._streams = {direction: torch.cuda.Stream() for direction in DIRECTIONS}
            # (target, source) per direction.
            self._buffers = {}
            for direction in DIRECTIONS:
                pinned = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
                on_device = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
                self._buffers[direction] = (
                    (on_device, pinned) if direction == "h2d" else (pinned, on_device)
                )
            torch.cuda.synchronize()

    def copy(self, directions: Sequence[str], count: int) -> list[CopyTimes]:
        """Make `count` copies in each direction, all directions at once.

        Return their times when all have ended.
        """
        with torch.cuda.device(self._device):
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            events: list[list[Any]] = [[] for _ in directions]
            for number in range(count + 1):
                for direction, direction_events in zip(directions, events, strict=True):
                    target, source = self._buffers[direction]
                    with torch.cuda.stream(self._streams[direction]):
                        if number:
                            target.copy_(source, non_blocking=True)
                        else:
                            self._streams[direction].wait_event(begin)
                        event = torch.cuda.Event(enable_timing=True, blocking=True)
                        event.record()
                    direction_events.append(event)
            # Blocking events put the waiting thread to sleep: spinning would take a
            # core from a concurrent update.
            for direction_events in events:
                direction_events[-1].synchronize()
            return [
                [begin.elapsed_time(event) for event in direction_events]
                for direction_events in events
            ]

    def count_for(self, directions: Sequence[str], seconds: float) -> int:
        """Return how many copies take about `seconds`."""
        copy_s = min(copy_durations(self.copy(directions, _MIN_COPIES)[0]))
        return max(_MIN_COPIES, round(seconds / copy_s))


def copy_durations(times: CopyTimes) -> list[float]:
    """Return the duration of each copy in seconds."""
    return [(end - begin) / 1e3 for begin, end in itertools.pairwise(times)]


def combined_bytes_per_s(times: Sequence[CopyTimes], nbytes: int) -> float:
    """Return the throughput of all directions together while all were busy.

    Each copy has a constant rate.
    """
    begin, end = (
        max(direction[0] for direction in times),
        min(direction[-1] for direction in times),
    )
    moved = sum(
        float(
            np.diff(
                np.interp([begin, end], direction, nbytes * np.arange(len(direction)))
            )[0]
        )
        for direction in times
    )
    return moved / (end - begin) * 1e3


def measure_pinned_copies(setup: Setup, record: MeasurementRecord) -> None:
    """Measure copies of pinned memory, by CUDA events.

    The rates are `h2d_bytes_per_s`, `d2h_bytes_per_s` and `duplex_bytes_per_s`.
    """
    assert setup.device is not None
    link = LinkProbe(setup.device)
    how = f"pinned copies of {COPY_BYTES >> 20} MiB by CUDA events"
    for direction in DIRECTIONS:
        timing = Timing.from_runs(copy_durations(_copies(link, [direction], setup)[0]))
        record.rate(
            f"{direction}_bytes_per_s", COPY_BYTES / timing.seconds, how, timing
        )
    times = _copies(link, DIRECTIONS, setup)
    how = f"{how}, sum of both directions at once"
    record.rate("duplex_bytes_per_s", combined_bytes_per_s(times, COPY_BYTES), how)


def _copies(
    link: LinkProbe, directions: Sequence[str], setup: Setup
) -> list[CopyTimes]:
    count = link.count_for(directions, setup.window_s)
    setup.ranks.wait()
    return link.copy(directions, count)


def measure_pageable_copies(setup: Setup, record: MeasurementRecord) -> None:
    """Measure copies of pageable memory by the host clock: they block the host.

    The rates are `h2d_pageable_bytes_per_s` and `d2h_pageable_bytes_per_s`.
    """
    # Written before, and not pinned.
    host = torch.ones(COPY_BYTES, dtype=torch.uint8)
    on_device = torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{setup.device}")
    for direction, target, source in (
        ("h2d", on_device, host),
        ("d2h", host, on_device),
    ):

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source)
            torch.cuda.synchronize(setup.device)

        timing = measure_time(copy, setup.window_s, setup.ranks)
        how = f"pageable copies of {COPY_BYTES >> 20} MiB by the host clock"
        record.rate(
            f"{direction}_pageable_bytes_per_s",
            COPY_BYTES / timing.seconds,
            how,
            timing,
        )


def measure_traffic(setup: Setup, record: MeasurementRecord) -> None:
    """Measure the traffic of host memory during updates and copies.

    The CPU updates while pinned memory is copied in both directions.
    """
    assert setup.device is not None
    link = LinkProbe(setup.device)

    def copy() -> int:
        link.copy(DIRECTIONS, _BATCH_COPIES)
        return 2 * _BATCH_COPIES * COPY_BYTES

    record_traffic(
        setup, record, copy, "pinned copies in both directions", setup.threads
    )
