"""The call stacks that hold the memory of a device at a time, as a tree."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pandas as pd

from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.metrics.holders.categories import categorized_allocations
from ebbtide.analysis.metrics.holders.holders import holders_at
from ebbtide.profiler.trace import Trace

_NO_STACK = "no call stack"
# Frames by which torch calls the forward of a module, two for each module.
_CALL = re.compile(r"_(?:wrapped_)?call_impl \(")


@dataclass
class StackNode:
    """A frame, with the blocks that were allocated in it and in the frames that it called."""

    label: str  # The frame, as `function (file:line)`; of the root, its category, or a module, other text.
    bytes: int = 0  # Bytes of these blocks.
    children: dict[str, StackNode] = field(default_factory=dict)  # The frames that it called, by label.

    def add(self, labels: Iterable[str], size: int) -> None:
        """Add blocks below this node, by their path from here."""
        node = self
        node.bytes += size
        for label in labels:
            node = node.children.setdefault(label, StackNode(label))
            node.bytes += size

    def largest_first(self) -> list[StackNode]:
        """Return the children by bytes in descending order."""
        return sorted(self.children.values(), key=lambda child: -child.bytes)


def stack_tree(trace: Trace, rank: int, at_ns: int | None = None, device: str | None = None) -> StackNode | None:
    """Return the blocks that are held at a time, by category and then by call stack from the outermost frame.

    Blocks without a stack are below their module.

    Args:
        at_ns: The time, ns; None: that of the largest use.
        device: The device; None: the rank's first one.

    Returns:
        The root; None where allocations were not recorded.
    """
    device = device or main_device(trace, rank)
    holders = holders_at(trace, rank, at_ns, device)
    if device is None or holders is None or not (trace.allocations(rank)["device"] == device).any():
        return None
    if at_ns is None:
        at_ns = holders.at_ns
    rows = categorized_allocations(trace, rank, device)
    live = rows[(rows["start_ns"] <= at_ns) & (rows["end_ns"] > at_ns)]
    sums = live.groupby(["category", "stack", "module"], dropna=False, observed=True)["bytes"].sum()
    root = StackNode(holders.pool)
    for (category, stack, module), size in sums.items():
        if pd.isna(stack):
            path = [_NO_STACK if pd.isna(module) else str(module)]
        else:
            path = [line for line in str(stack).splitlines() if not _CALL.match(line)]
        root.add(["not known" if pd.isna(category) else str(category), *path], int(size))
    return root
