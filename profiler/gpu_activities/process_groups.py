"""Process groups of collectives in Kineto traces."""

from __future__ import annotations

from ebbtide.profiler.chrome_trace.events import Args

# Calls between two ranks of a group: the other ranks of the group do not take part.
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")


def process_group(args: Args) -> str | None:
    """Return a label of the process group of a collective, such as `3 [0, 1]`: its name, then its ranks.

    Returns:
        None where the kernel states no group (torch before 2.4, ROCm), and for a call between two ranks.
    """
    if args.group_name is None or str(args.collective).lower() in _POINT_TO_POINT:
        return None
    return f"{args.group_name} {args.group_ranks}" if args.group_ranks is not None else str(args.group_name)
