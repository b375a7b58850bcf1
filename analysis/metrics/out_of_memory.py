"""Explains an out-of-memory error of a recorded job by its figures, the holders, and
what would have freed memory."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.devices import ALLOCATION_POOLS, main_device
from ebbtide.analysis.metrics.holders.holders import (
    Holder,
    Holders,
    holders_at,
    holders_of,
)
from ebbtide.phases import UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import OutOfMemoryRecord
from ebbtide.units import bytes_text

OFFLOAD, CHECKPOINTING, SEGMENTS, MICRO_BATCH = (
    "offload optimizer state",
    "activation checkpointing",
    "expandable segments",
    "half the micro-batch",
)


@dataclass(frozen=True)
class Remedy:
    """A change of the job that frees memory."""

    name: str  # The change.
    bytes: int  # Bytes that it frees at most.
    # Whether this many bytes cover what was missing; None: not known.
    enough: bool | None
    text: str  # The same as a sentence, with the reason.


@dataclass(frozen=True, repr=False)
class OutOfMemory(TabularResult):
    """An out-of-memory error of a rank."""

    rank: int
    record: OutOfMemoryRecord  # The figures at that time.
    errors: int  # Number of recorded errors of this rank; this is the last one.
    # The memory at that time by holder: of the pool `requested` or `tensors` (recorded
    # allocations), `allocated`, or `heap` of a job on the CPU. What nobody is known to
    # hold is a holder with None.
    memory: Holders
    # The time at which the holders are known, where it is not the time of the error.
    holders_t_ms: float | None
    remedies: list[Remedy]  # What would have freed memory, by bytes.

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide memory --at oom --json` prints."""
        sizes = [
            f"{kind}_bytes"
            for kind in ("requested", "free", "reserved", "allocated", "capacity")
        ]
        return {
            "rank": self.rank,
            **self.memory.as_json(),
            "holders_t_ms": self.holders_t_ms,
            **{
                key: getattr(self.record, key)
                for key in ("iteration", "phase", *sizes, "message")
            },
            "errors": self.errors,
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per holder, with the fields of `Holder` as columns."""
        return self.memory.to_pandas()


def out_of_memory(trace: Trace, rank: int) -> OutOfMemory | None:
    """Explain the last out-of-memory error of a rank; None where there is none.

    The holders come from the recorded allocations if these include the time of the
    error, else from the inventory taken at the error, else from the last one before.
    """
    records = trace.rank(rank).out_of_memory
    if not records:
        return None
    record = records[-1]
    device = record.device or main_device(trace, rank)
    span = trace.span_ns()
    begin_ns = span[0] if span is not None else record.t_ns
    holders, holders_ns, pool = _holders(trace, rank, device, record)
    bytes_held = sum(holder.bytes for holder in holders)
    total = (
        bytes_held
        if pool in ALLOCATION_POOLS
        else max(record.allocated_bytes or 0, bytes_held)
    )
    if total > bytes_held:
        holders.append(Holder(None, None, None, total - bytes_held))
    holders.sort(key=lambda holder: -holder.bytes)
    return OutOfMemory(
        rank=rank,
        record=record,
        errors=len(records),
        memory=Holders(
            pool,
            device or "",
            record.t_ns,
            (record.t_ns - begin_ns) / 1e6,
            total,
            holders,
        ),
        holders_t_ms=None
        if holders_ns in (None, record.t_ns)
        else (holders_ns - begin_ns) / 1e6,
        remedies=_remedies(record, device, holders),
    )


def _holders(
    trace: Trace, rank: int, device: str | None, record: OutOfMemoryRecord
) -> tuple[list[Holder], int | None, str]:
    """Return the holders, the time at which they are known, and the pool that they
    divide."""
    if _has_allocations_at(trace, rank, device, record.t_ns):
        at_error = holders_at(trace, rank, record.t_ns, device)
        if at_error is not None:
            return list(at_error.holders), record.t_ns, at_error.pool
    pool = "heap" if device == "cpu" and record.reserved_bytes is None else "allocated"
    taken = (
        entry for entry in trace.rank(rank).inventories if entry.t_ns <= record.t_ns
    )
    inventory = max(taken, key=lambda entry: entry.t_ns, default=None)
    if inventory is None:
        return [], None, pool
    return (
        holders_of(inventory, device, with_gradients=inventory.t_ns == record.t_ns),
        inventory.t_ns,
        pool,
    )


def _has_allocations_at(trace: Trace, rank: int, device: str | None, t_ns: int) -> bool:
    """Return whether each allocation was recorded at a time.

    The record has events in the phase of that time.
    """
    rows = trace.allocations(rank)
    rows = rows[rows["device"] == device]
    if rows.empty or int(rows["start_ns"].min()) > t_ns:
        return False
    phases = trace.phases(rank)
    starts = phases.loc[phases["start_ns"] <= t_ns, "start_ns"]
    last_ns = np.nanmax([rows["start_ns"].max(), rows["end_ns"].astype(float).max()])
    return bool(last_ns >= (starts.max() if len(starts) else t_ns))


def shortfall_bytes(record: OutOfMemoryRecord) -> int | None:
    """Return the missing bytes, which are the requested bytes minus the bytes free on
    the device; None: not known."""
    if record.requested_bytes is None or record.free_bytes is None:
        return None
    return max(record.requested_bytes - record.free_bytes, 0)


def make_remedy(
    name: str,
    size: int,
    record: OutOfMemoryRecord,
    reason: str,
    enough: bool | None = None,
) -> Remedy:
    """Return a remedy whose text compares its bytes with those that were missing. It
    frees at most `size` bytes; `enough` is whether the change suffices, where bytes
    alone do not tell."""
    missing = shortfall_bytes(record)
    if enough is None and missing is not None:
        enough = size >= missing
    text = f"{name} frees at most {bytes_text(size)} ({reason})"
    if missing and enough:
        text += f", enough for the {bytes_text(missing)} that were missing"
    elif missing:
        text += f", {size / missing:.0%} of the {bytes_text(missing)} that were missing"
    return Remedy(name, size, enough, text)


def _remedies(
    record: OutOfMemoryRecord, device: str | None, holders: list[Holder]
) -> list[Remedy]:
    remedies = []
    on_gpu = device is not None and device != "cpu"
    state = sum(
        holder.bytes for holder in holders if holder.category == "optimizer_state"
    )
    if state and on_gpu:
        remedies.append(
            make_remedy(OFFLOAD, state, record, "all optimizer state on the device")
        )
    if any(holder.category == "activation" for holder in holders):
        activations = sum(
            holder.bytes for holder in holders if holder.category == "activation"
        )
        origin = "all activations"
    else:
        activations = sum(holder.bytes for holder in holders if holder.category is None)
        origin = "all memory of which the holder is not known, activations among it"
    if activations:
        remedies.append(make_remedy(CHECKPOINTING, activations, record, origin))
    temporaries = sum(
        holder.bytes
        for holder in holders
        if holder.category == "temporary"
        and record.phase != UPDATE
        # Those of an optimizer do not depend on the batch.
        and "/optim" not in (holder.site or "")
    )
    if temporaries:
        origin = f"{origin} and temporaries" if activations else "all temporaries"
    if activations + temporaries:
        freed = (activations + temporaries) // 2
        remedies.append(make_remedy(MICRO_BATCH, freed, record, f"half of {origin}"))
    if (
        on_gpu
        and record.reserved_bytes is not None
        and record.allocated_bytes is not None
    ):
        unused = max(record.reserved_bytes - record.allocated_bytes, 0)
        if unused:
            requested = record.requested_bytes
            fits = (
                None
                if requested is None
                else unused + (record.free_bytes or 0) >= requested
            )
            reason = (
                "reserved by torch, but not allocated; "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
            remedies.append(make_remedy(SEGMENTS, unused, record, reason, fits))
    return sorted(remedies, key=lambda remedy: -remedy.bytes)
