"""Trains a GPT in bf16 with plain torch: the job that is recorded.

It prints its steps as examples/train_gpt.py does. With --results it also measures its
phases by its own events (without a GPU by the host clock), makes copies of known size,
and writes these and the memory peaks of torch as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import ROOT, load
from torch.nn import functional as F

from ebbtide.phases import PHASES

VOCABULARY = 512
# A power of two: torch rounds pinned memory up to one. So many per direction: half a
# second of a PCIe 5 link.
COPY_BYTES, COPIES = 1 << 28, 100
# Idle time before and after copies, so that a counter with a lag shows all of them.
PAUSE_S = 0.5


class Marks:
    """Measures each phase by a pair of marks."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._pairs: dict[str, list[tuple[Any, Any]]] = {phase: [] for phase in PHASES}

    def around(self, phase: str, call: Callable[[], Any]) -> Any:
        """Call a function as part of a phase."""
        begin = self._mark()
        result = call()
        self._pairs[phase].append((begin, self._mark()))
        return result

    def ms(self) -> dict[str, list[float]]:
        """Return the duration in ms of each phase, in order."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return {
                phase: [a.elapsed_time(b) for a, b in pairs]
                for phase, pairs in self._pairs.items()
            }
        return {
            phase: [(b - a) / 1e6 for a, b in pairs]
            for phase, pairs in self._pairs.items()
        }

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def known_copies() -> list[dict[str, Any]]:
    """Make pinned copies, first to the device, then to the host; return their bytes and
    times."""
    host = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    on_device = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    copies = []
    for direction, target, source in (
        ("h2d", on_device, host),
        ("d2h", host, on_device),
    ):
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        begin = time.monotonic_ns()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        copies.append(
            {
                "way": direction,
                "bytes": COPY_BYTES,
                "count": COPIES,
                "start_ns": begin,
                "end_ns": time.monotonic_ns(),
            }
        )
        time.sleep(PAUSE_S)
    return copies


def peaks() -> dict[str, int]:
    """Return the memory peaks of torch in bytes."""
    stats = torch.cuda.memory_stats()
    return {
        pool: stats[f"{pool}_bytes.all.peak"]
        for pool in ("allocated", "reserved", "requested")
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 48),
        ("width", 1600),
        ("heads", 25),
        ("context", 1024),
        ("batch", 8),
        ("steps", 20),
    ):
        flags.add_argument(f"--{name}", type=int, default=default)
    flags.add_argument("--results", type=Path, help="JSON file to write")
    args = flags.parse_args()

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    # Made on the device: making so many random numbers on the host would take longer
    # than the training.
    with torch.device("cuda" if on_gpu else "cpu"):
        model = load(ROOT / "examples" / "train_gpt.py").GPT(
            VOCABULARY, args.context, args.layers, args.width, args.heads
        )
        tokens = torch.randint(VOCABULARY, (args.batch, args.context + 1))
    params = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    marks = Marks(on_gpu)
    copies: list[dict[str, Any]] = []
    for step in range(args.steps):
        if args.results and on_gpu and step == args.steps // 2:
            copies = known_copies()
        begun = time.perf_counter()
        logits = marks.around("forward", lambda: model(tokens[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        marks.around("backward", loss.backward)
        marks.around("update", optimizer.step)
        # Otherwise they would be in memory together with those of the next step.
        del logits
        optimizer.zero_grad()
        print(
            f"step {step:3d}  loss {loss.item():.4f}  "
            f"{1e3 * (time.perf_counter() - begun):7.1f} ms",
            flush=True,
        )
    if args.results:
        results = {
            "params": params,
            "phases_ms": marks.ms(),
            "copies": copies,
            "peaks": peaks() if on_gpu else None,
        }
        args.results.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
