"""What the agent was asked to record, as the collector hands it over in the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

SPOOL_DIRECTORY = "EBBTIDE_SPOOL"  # set: record into this directory
OPTIONS = "EBBTIDE_OPTIONS"


@dataclass(frozen=True)
class Options:
    """first, last: the iterations to record, [first, last); no last: to the end. max_bytes: of spool, for this
    process. poll_ms: how often memory is read between phase boundaries; 0: never. allocator_iterations: of how
    many iterations the CUDA allocator's history is taken. transfers: record each copy (CUPTI)."""

    first: int = 0
    last: int | None = None
    max_bytes: int | None = None
    poll_ms: float = 25.0
    allocator_iterations: int = 0
    transfers: bool = False

    def environment(self, spool_directory: str) -> dict[str, str]:
        return {SPOOL_DIRECTORY: spool_directory, OPTIONS: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Options:
        return cls(**json.loads(os.environ.get(OPTIONS, "{}")))
