"""The operation: its lane, what it reads, how long it takes, and what performs it."""

from ebbtide.interleave.model.kinds import Flow, Kind
from ebbtide.interleave.simulation.lanes import Lane

# One core reads about so many bytes/s.
BYTES_PER_S = 10e9


def lanes(machine):
    """Yield a lane, whose operations share the bandwidth of host memory with updates
    and copies."""
    yield Lane("checker", "host memory")


KINDS = (
    Kind(
        "checksum",
        resources=("checker",),
        flow=lambda op, plan: Flow(reads=("grad@host",)),
        seconds=lambda op, rates: rates.operation_s + op.nbytes / BYTES_PER_S,
        rates=lambda op: (),
        host_bytes=lambda op, workload: op.nbytes,
        perform="gradient_checksum.performing:checksum",
    ),
)
