"""Writes the files of torch.profiler of a job of many ranks, with kernels, collectives
and copies.

Each iteration has a forward, a backward and an update of `LAYERS` layers. All ranks run
the same operations. What sets some of them apart is that of `fleet.PECULIAR_RANKS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 8
BASE_NS = 1_790_857_026_000_000_000
PERIOD_US = 400_000.0
COPY_BYTES = 64 << 20
Event = dict[str, Any]


class RankFile:
    """The events of one rank.

    slow: a factor of the times of phases. late_us: the delay of its first phase.
    backward_us: more time of its backward. link: a factor of the rate of its copies.
    """

    def __init__(
        self, rank: int, slow: float, late_us: float, backward_us: float, link: float
    ) -> None:
        self.rank, self.slow, self.late_us, self.backward_us, self.link = (
            rank,
            slow,
            late_us,
            backward_us,
            link,
        )
        self.random = np.random.default_rng(rank)
        self.correlation = 0

    def iteration(self, number: int) -> Iterator[Event]:
        begin = number * PERIOD_US
        yield _span(f"ProfilerStep#{number}", begin, PERIOD_US, "user_annotation", 1)
        unit = (
            self.slow
            * PERIOD_US
            * 0.8
            * float(np.clip(self.random.normal(1.0, 0.01), 0.9, 1.1))
        )
        start = begin + self.late_us + 2000
        backward = start + 0.3 * unit
        update = backward + 0.5 * unit + self.backward_us
        yield from self._phase("forward", start, 0.3 * unit - 10, "gemm_forward", None)
        yield from self._phase(
            "backward",
            backward,
            0.5 * unit + self.backward_us - 10,
            "gemm_backward",
            "ncclDevKernel_ReduceScatter",
        )
        yield from self._phase(
            "Optimizer.step#AdamW.step",
            update,
            0.2 * unit - 10,
            "multi_tensor_adam",
            None,
        )

    def _phase(
        self,
        name: str,
        start: float,
        length: float,
        kernel: str,
        collective: str | None,
    ) -> Iterator[Event]:
        yield _span(name, start, length, "user_annotation", 1)
        part = length / LAYERS
        for layer in range(LAYERS):
            at = start + layer * part
            yield from self._work(
                at, at + 0.02 * part, 0.6 * part, f"{kernel}_{layer % 3}", "kernel", 7
            )
            yield from self._work(
                at + 5,
                at + 0.65 * part,
                0.2 * part,
                f"{kernel}_elementwise",
                "kernel",
                7,
            )
            if collective is not None:
                yield from self._work(
                    at + 10, at + 0.3 * part, 0.4 * part, collective, "kernel", 20
                )
        if collective is None:
            direction = (
                "HtoD (Pinned -> Device)"
                if kernel.startswith("gemm")
                else "DtoH (Device -> Pinned)"
            )
            duration = 2600.0 / self.link * float(self.random.uniform(1.0, 1.02))
            rows = {"bytes": COPY_BYTES}
            yield from self._work(
                start + 15,
                start + 0.1 * length,
                duration,
                f"Memcpy {direction}",
                "gpu_memcpy",
                9,
                **rows,
            )

    def _work(
        self,
        call: float,
        start: float,
        length: float,
        name: str,
        cat: str,
        stream: int,
        **more: Any,
    ) -> Iterator[Event]:
        self.correlation += 1
        args = {"correlation": self.correlation}
        yield _span("cudaLaunchKernel", call, 4.0, "cuda_runtime", 1, **args)
        yield {
            **_span(
                name,
                start,
                length,
                cat,
                stream,
                device=0,
                stream=stream,
                **args,
                **more,
            ),
            "pid": 0,
        }


def _span(
    name: str, start: float, length: float, cat: str, thread: int, **args: Any
) -> Event:
    times = {"ts": round(start, 3), "dur": round(length, 3)}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": thread,
        **times,
        "args": args,
    }


def write_file(
    path: Path,
    rank: int,
    ranks: int,
    iterations: int,
    ranks_per_host: int,
    **peculiarities: float,
) -> None:
    """Write the file of a rank. peculiarities: see `RankFile`."""
    file = RankFile(rank, **peculiarities)
    events = [event for number in range(iterations) for event in file.iteration(number)]
    head = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84_942_979_072}
        ],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "host_name": f"node{rank // ranks_per_host:03d}",
        "baseTimeNanoseconds": BASE_NS,
    }
    path.write_text(json.dumps({**head, "traceEvents": events}))
