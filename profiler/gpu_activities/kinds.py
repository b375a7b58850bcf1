"""Kinds of GPU activities by the categories and names that torch.profiler (Kineto) gives them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

KINDS = ("compute", "communication", "copy", "memset")
COMMUNICATION = KINDS.index("communication")
# The number of a copy between host and device, which is a row of the table `transfers` and not of `kernels`.
TRANSFER = len(KINDS)
# Each category by its name in torch, and in torch 1.8.
ACTIVITY_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
# Calls of the runtime or driver, by which the host launches work.
CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
_COPIES = frozenset({"gpu_memcpy", "Memcpy"})
_MEMSETS = frozenset({"gpu_memset", "Memset"})
# ncclDevKernel_AllReduce_Sum_f32_RING_LL(...), ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(...); RCCL uses both names.
_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)
# "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
_TRANSFER_NAME = re.compile(r"Memcpy (HtoD|DtoH)(?: \((\w+) -> (\w+)\))?")
_HOST_MEMORY = {"Pinned": "pinned", "Pageable": "pageable"}


@lru_cache(maxsize=1 << 14)
def kind_of(category: str, name: str) -> int:
    """Return the position of an activity's kind in KINDS, or TRANSFER.

    Args:
        category: One of ACTIVITY_CATEGORIES.
        name: The name of the activity.
    """
    if category in _COPIES:
        return TRANSFER if _TRANSFER_NAME.match(name) else KINDS.index("copy")
    if category in _MEMSETS:
        return KINDS.index("memset")
    return COMMUNICATION if _COLLECTIVE.search(name) else KINDS.index("compute")


class TransferKind(NamedTuple):
    """Kind of a copy between host and device.

    Attributes:
        direction: `h2d` or `d2h`.
        host_memory: `pinned` or `pageable`; None where the name does not say.
    """

    direction: str
    host_memory: str | None


def transfer_kind(name: str) -> TransferKind:
    """Return the kind of a copy whose `kind_of` is TRANSFER."""
    kind, source, target = _TRANSFER_NAME.match(name).groups()  # type: ignore[union-attr]
    if kind == "HtoD":
        return TransferKind("h2d", _HOST_MEMORY.get(source))
    return TransferKind("d2h", _HOST_MEMORY.get(target))
