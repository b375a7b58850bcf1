"""A training job for `ebbtide profile`: `python job.py SECONDS [UUID=BYTES ...]` trains
for so long, a rank per UUID.

Each rank trains on the CPU and says that it does so on the card of its UUID, with so
much memory: the functions of `torch.cuda` that a recording calls are replaced. Without
UUIDs the job is what it is, a job on the CPU.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import time
import uuid
from types import SimpleNamespace
from typing import Any

import torch

# No garbage: to collect it at the end of each process takes long.
gc.freeze()

STEP_S = 0.02
MIN_STEPS = 15


class HostEvent:
    """An event of a device that runs everything at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.t_ns = 0

    def record(self, stream: Any = None) -> None:
        self.t_ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.t_ns - self.t_ns) / 1e6


def stand_in_for_cuda(card: str) -> None:
    """Replace the functions of torch.cuda, so that this process uses a card, given as
    UUID=BYTES."""
    # CUDA gives UUIDs without NVML's prefix.
    prefixed, _, total = card.partition("=")
    bare = str(uuid.UUID(prefixed.partition("-")[2]))
    properties = SimpleNamespace(
        name="as CUDA calls it", total_memory=int(total), uuid=bare
    )
    used = {"all": {"current": 10**9}}
    cuda: dict[str, Any] = {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: properties,
        "Event": HostEvent,
        "Stream": lambda device: None,
    }
    for name, function in cuda.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_memoryStats = lambda device: {
        "allocated_bytes": used,
        "reserved_bytes": used,
    }


def train(seconds: float) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    end_s = time.monotonic() + seconds
    steps = 0
    # On a busy machine a step takes longer, and ranks need steady iterations too.
    while time.monotonic() < end_s or steps < MIN_STEPS:
        steps += 1
        loss = model(torch.ones(4, 8)).square().mean()
        time.sleep(STEP_S / 2)
        loss.backward()
        time.sleep(STEP_S / 2)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    seconds, cards = float(sys.argv[1]), sys.argv[2:]
    if not cards:
        train(seconds)
        return
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as each rank's optimizer would
    ranks = []
    for rank, card in enumerate(cards):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(cards))
            )
            stand_in_for_cuda(card)
            train(seconds)
            # What a usual exit does beyond this takes most of a second per rank.
            atexit._run_exitfuncs()
            os._exit(0)
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
