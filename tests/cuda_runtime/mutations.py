"""Trains with a kind of wait left out: python -m tests.cuda_runtime -m
tests.cuda_runtime.mutations KIND MODE

Prints whether results are right, and the number of races (CUDA_RUNTIME_ORDER=1).
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.devices.cuda import CudaMark, CudaStreams
from ebbtide.interleave.engine.numerics.triton_kernel import SharedHostMemory
from tests.cuda_runtime import runtime
from tests.cuda_runtime.failing_calls import train

_wait, _record = CudaStreams.wait, CudaStreams.record
# Marks of the job's stream.
_of_job: set[Any] = set()


def leave_out_waits_of_streams() -> None:
    CudaStreams.wait = lambda self, stream, marks: None  # type: ignore[method-assign]


def leave_out_waits_for_job() -> None:
    """Let no stream wait for what the job has issued."""

    def record(self: CudaStreams, stream: Any) -> CudaMark:
        mark = _record(self, stream)
        if stream == "job":
            _of_job.add(mark)
        return mark

    def wait(self: CudaStreams, stream: Any, marks: Sequence[Any]) -> None:
        _wait(self, stream, [mark for mark in marks if mark not in _of_job])

    CudaStreams.record, CudaStreams.wait = record, wait  # type: ignore[method-assign]


def leave_out_waits_by_job() -> None:
    """Let the job's stream wait for no other."""

    def wait(self: CudaStreams, stream: Any, marks: Sequence[Any]) -> None:
        if stream != "job":
            _wait(self, stream, marks)

    CudaStreams.wait = wait  # type: ignore[method-assign]


def leave_out_waits_of_host() -> None:
    CudaMark.synchronize = lambda self: None  # type: ignore[method-assign]
    CudaMark.is_passed = property(lambda self: True)  # type: ignore[method-assign,assignment]


def free_tables_early() -> None:
    """Do not keep what kernels read from the host until they have."""

    def keep(self: SharedHostMemory, *memory: torch.Tensor) -> Callable[[], None]:
        return torch.cuda.current_stream().synchronize

    SharedHostMemory.keep = keep  # type: ignore[method-assign,assignment]


MUTATIONS: dict[str, Callable[[], object]] = {
    "nothing": bool,
    "streams": leave_out_waits_of_streams,
    "for-job": leave_out_waits_for_job,
    "by-job": leave_out_waits_by_job,
    "host": leave_out_waits_of_host,
    "tables": free_tables_early,
}


def main(kind: str, mode: str) -> None:
    *_, expected = train(mode)
    MUTATIONS[kind]()
    *errors, digest = train(mode)
    print(
        "right" if digest == expected else "wrong",
        f"{runtime.race_count()} races, {sum(map(bool, errors))} errors",
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
