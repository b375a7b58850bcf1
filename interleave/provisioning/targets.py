"""The machines that a job is planned for: presets or files, in another host if requested, with their prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.errors import MachineError
from ebbtide.machines.catalog import find_machine, presets
from ebbtide.machines.data_sheets import with_host
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class PlanTarget:
    """A machine to plan for.

    Attributes:
        machine: The machine.
        source: Its preset or file; None: that of the trace, or in another host.
        price_per_hour: Price of a host; None: not known.
    """

    machine: Machine
    source: str | None
    price_per_hour: float | None


def find_targets(
    names: Sequence[str], host: str | None, prices: Sequence[float], trace: Trace | None
) -> list[PlanTarget]:
    """Return the machines to plan for.

    Args:
        names: Presets or files; empty for the machine recorded in the trace, else all presets.
        host: Another host for their GPUs; None: their own.
        prices: Prices of a host per hour: none, one for all machines, or one for each.
        trace: The trace of the job.

    Raises:
        MachineError: There is no such machine, the host is not one, or the numbers of machines and prices differ.
    """
    recorded = trace.meta.machine if trace is not None and not names else None
    sources: list[str | None] = [None] if recorded is not None else [*(names or presets())]
    if len(prices) not in (0, 1, len(sources)):
        raise MachineError(
            f"there are {len(prices)} prices for {len(sources)} machines: write one for all, or one for each"
        )
    each: list[float | None] = [*prices] * (len(sources) if len(prices) == 1 else 1) or [None] * len(sources)
    targets = []
    for source, price in zip(sources, each, strict=True):
        machine = find_machine(source, recorded, str(trace.path) if trace is not None else "the trace")
        if host is None:
            targets.append(PlanTarget(machine, source, price))
        else:
            targets.append(PlanTarget(with_host(machine, host), None, price))
    return targets
