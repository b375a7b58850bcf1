"""The options of `ebbtide run`, as a job's processes get them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

# The number of iterations under `zero-offload` whose windows a policy is planned with.
WINDOW_STEPS = 3
# Bytes/s of the link of an emulated device per direction, without a machine.
LINK_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, for the processes of its job.

    Attributes:
        folder: Where each process writes its log.
        policy: The policy after the first iterations; `static`: the best static split
            that fits; `none`: torch updates, and only losses are logged.
        steps: The number of iterations after which the job ends; None: its own end.
        memory_budget: Bytes of device memory for state; None: what is free.
        machine: Path of a machine file with the rates to plan with; None: measured.
        link_bytes_per_s: Rate of an emulated device per direction.
        gpu_params_per_s: Rate of its updates; None: what it does.
        compares: Whether the run is one of a comparison: losses and parameters are
            logged, and state that fits stays with the engine.
        weights, activations: As for `move_layers`; `resident` and `keep` move nothing.
        other_kernels: Whether torch updates with another kernel than it would.
    """

    folder: str
    policy: str = "adaptive"
    steps: int | None = None
    memory_budget: float | None = None
    machine: str | None = None
    link_bytes_per_s: float = LINK_BYTES_PER_S
    gpu_params_per_s: float | None = None
    compares: bool = False
    weights: str = "resident"
    activations: str = "keep"
    other_kernels: bool = False

    @property
    def moves_layers(self) -> bool:
        return (self.weights, self.activations) != ("resident", "keep")

    def text(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> RunOptions:
        return cls(**json.loads(text))
