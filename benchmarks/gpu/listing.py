"""Lists the steps, the most valuable first, with their time limits.

Durations assume one GPU with PCIe 5 (50 GB/s per direction) and 16 cores (1 G parameters/s updated, 3 GB/s pinned; each
process starts with 8 s of imports and CUDA). State is 12 bytes per parameter:

- policies-1.5b: one process per policy: 8 s, 15 s for the model (made on the host by one thread, 0.1 G param/s), 18 GB
  pinned in 6 s, 8 iterations of 1 to 2 s: 42 s; five of them 210 s.
- policies-4b: 8 s, 40 s for the model, 48 GB pinned in 16 s, 5 iterations of 3 to 4 s: 82 s; five of them 410 s.
- deepspeed: CPU Adam compiled in 50 s, then 8 s, 15 s for the model, 12 s for the engine, 6 iterations of 2 to 4 s:
  50 s; seven of them 350 s. At the time limit the results so far are kept.
- cost: 9 runs of 8 s and 32 iterations of 0.2 s: 135 s.
- windows: 3 runs of 12 s, 15 GB pinned in 5 s and 8 iterations of 4.5 s: 170 s.
- suite: five recorded jobs of 15 s, a calibration of 20 s: 110 s.

The first seven take 490 s, one call of 9.5 minutes. `windows`, `deepspeed` and `torchao` are a second call, `cost` and
`policies-4b` a third.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEPS = Path(__file__).resolve().parent / "steps"


@dataclass(frozen=True)
class BenchmarkStep:
    """One step.

    Attributes:
        name: Name of the step and of its result file.
        about: Description of the step.
        script: File in `steps/`.
        needs_s: Approximate duration; the step is not started with less time left.
        limit_s: Time limit.
        options: Options of the script.
        after: Steps whose files it reads, which must be done.
        rehearse_s: Time limit in a rehearsal.
    """

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
    BenchmarkStep("imports", "imports of all other steps", "imports.py", 15, 60),
    BenchmarkStep("memory", "host memory: rates of filling and pinning", "memory.py", 20, 60),
    BenchmarkStep(
        "calibrate", "rates of the machine; link counters against copies of known size", "calibrate.py", 55, 100
    ),
    BenchmarkStep("bits", "the same bits under every policy and on the CPU", "bits.py", 40, 100),
    BenchmarkStep("suite", "tests that need a GPU", "suite.py", 110, 200),
    BenchmarkStep("profile", "a recorded job against its own measurements", "recorded.py", 40, 100),
    BenchmarkStep(
        "policies-1.5b",
        "policies at 1.5 G parameters: measured and predicted",
        "policies.py",
        210,
        300,
        ("--name", "policies-1.5b", "--params", "1.5e9", "--iterations", "8"),
        ("calibrate",),
    ),
    BenchmarkStep(
        "windows",
        "long sequences: state parked in windows of free memory",
        "windows.py",
        170,
        260,
        after=("calibrate",),
    ),
    BenchmarkStep(
        "deepspeed", "offload by DeepSpeed, and by ebbtide in DeepSpeed, 1.5 G parameters", "zero_offload.py", 300, 420
    ),
    BenchmarkStep(
        "torchao",
        "torch's and torchao's optimizers on the job of policies-1.5b",
        "policies.py",
        90,
        150,
        ("--name", "torchao", "--params", "1.5e9", "--iterations", "5", "--against", "torch,torchao"),
        ("calibrate",),
    ),
    BenchmarkStep("cost", "cost of recording", "cost.py", 135, 200),
    BenchmarkStep(
        "policies-4b",
        "policies at 4 G parameters: measured and predicted",
        "policies.py",
        410,
        500,
        ("--name", "policies-4b", "--params", "4e9", "--iterations", "5"),
        ("calibrate",),
    ),
)
