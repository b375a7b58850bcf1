"""Agreement of all ranks of a job on a step that only all may take."""

from __future__ import annotations

import datetime
import itertools

import torch

# So long a rank waits for others, which may never ask.
_WAIT = datetime.timedelta(seconds=60)
_numbers = itertools.count()


def all_ranks_agree(own: bool) -> bool:
    """Return whether all ranks say yes at this call, which each rank makes in turn.

    The first rank that knows decides for all, so that none waits for another that has
    given up. No group of processes communicates.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return own
    ranks = distributed.get_world_size()
    if ranks == 1:
        return own
    store = distributed.PrefixStore(
        f"ebbtide-run-{next(_numbers)}",
        distributed.distributed_c10d._get_default_store(),
    )
    rank = distributed.get_rank()
    if not own:
        store.compare_set("decision", "", "no")
    store.set(f"rank-{rank}", "yes")
    try:
        store.wait([f"rank-{number}" for number in range(ranks)], _WAIT)
        decision = "yes"
    except RuntimeError:
        decision = "no"
    store.compare_set("decision", "", decision)
    return bool(store.get("decision") == b"yes")
