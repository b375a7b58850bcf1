"""What is run, the most valuable first, and how long each may take.

Lengths are of one GPU with PCIe 5 (50 GB/s each way) and 16 cores (1 G param/s updated, 3 GB/s pinned; each process
begins with 8 s of imports and CUDA). State is 12 bytes a parameter:

- policies-1.5b: a process each: 8 s, 15 s for the model (made on the host by one thread, 0.1 G param/s), 18 GB pinned
  in 6 s, 8 iterations of 1 to 2 s: 42 s; five of them 210 s.
- policies-4b: 8 s, 40 s for the model, 48 GB pinned in 16 s, 5 iterations of 3 to 4 s: 82 s; five of them 410 s.
- deepspeed: CPU Adam compiled in 50 s, then 8 s, 15 s for the model, 12 s for the engine, 6 iterations of 2 to 4 s:
  50 s; seven of them 350 s, and what is done when the limit comes stands.
- cost: 9 runs of 8 s and 32 iterations of 0.2 s: 135 s.
- windows: 3 runs of 12 s, 15 GB pinned in 5 s and 8 iterations of 4.5 s: 170 s.
- suite: five recorded jobs of 15 s, a calibration of 20 s: 110 s.

The first seven come to 490 s, a call of 9.5 minutes. `windows`, `deepspeed` and `torchao` are a second one, `cost` and
`policies-4b` a third.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEPS = Path(__file__).resolve().parent / "steps"


@dataclass(frozen=True)
class Step:
    """needs_s: about how long it takes; it is not begun with less left. limit_s: when it is stopped. after: steps that
    must be done, since it reads their files. rehearse_s: its limit in a rehearsal."""

    name: str
    about: str
    script: str
    needs_s: float
    limit_s: float
    options: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    rehearse_s: float = 90.0

    @property
    def command(self) -> tuple[str, ...]:
        return (str(STEPS / self.script), *self.options)


ALL = (
    Step("imports", "what all other steps import", "imports.py", 15, 60),
    Step("memory", "host memory: filled and pinned", "memory.py", 20, 60),
    Step("calibrate", "rates; counters against known copies", "calibrate.py", 55, 100),
    Step("bits", "the same bits under every policy and on the CPU", "bits.py", 40, 100),
    Step("suite", "the tests that need a GPU", "suite.py", 110, 200),
    Step("profile", "a recorded job against what it knows itself", "recorded.py", 40, 100),
    Step(
        "policies-1.5b",
        "policies at 1.5 G parameters: measured and predicted",
        "policies.py",
        210,
        300,
        ("--name", "policies-1.5b", "--params", "1.5e9", "--iterations", "8"),
        ("calibrate",),
    ),
    Step("windows", "long sequences: state parked in windows", "windows.py", 170, 260, after=("calibrate",)),
    Step("deepspeed", "DeepSpeed's offload and ours in it, 1.5 G parameters", "zero_offload.py", 300, 420),
    Step(
        "torchao",
        "torch's and torchao's optimizers on the job of policies-1.5b",
        "policies.py",
        90,
        150,
        ("--name", "torchao", "--params", "1.5e9", "--iterations", "5", "--against", "torch,torchao"),
        ("calibrate",),
    ),
    Step("cost", "what recording costs", "cost.py", 135, 200),
    Step(
        "policies-4b",
        "policies at 4 G parameters: measured and predicted",
        "policies.py",
        410,
        500,
        ("--name", "policies-4b", "--params", "4e9", "--iterations", "5"),
        ("calibrate",),
    ),
)
