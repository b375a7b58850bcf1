"""Lists the steps in the order in which they run, with their time limits.

First, within a minute, whether anything breaks; then the machine and the recorder; then the one table; then the rest.
Durations assume one GPU with PCIe 5 (50 GB/s per direction) and 16 cores (1 G parameters/s updated, 3 GB/s pinned; each
process starts with 8 s of imports and CUDA). State is 12 bytes per parameter:

- smoke: 16 processes of 8 to 15 s, four at a time; compute-sanitizer runs beside them: 60 s.
- table: a process per contestant and round: 8 s, 18 GB pinned in 6 s (DeepSpeed 40 GB and more, with 12 s for its
  engine), 8 steps of 0.3 to 2 s: 20 s, with DeepSpeed 50 s; seven of them 200 s a round. It continues in the next call.
- windows: 3 runs of 12 s, 15 GB pinned in 5 s and 8 iterations of 4.5 s: 170 s.
- suite: five recorded jobs of 15 s, a calibration of 20 s: 110 s.
- predictions: one process per policy: 8 s, 15 s for the model (made on the host by one thread), 18 GB pinned in 6 s,
  8 iterations of 1 to 2 s: 42 s; five of them 210 s.
- layers: ten runs in one process, each 4 s for the model and 10 iterations of 0.5 s: 100 s.
- cost: 9 runs of 8 s and 32 iterations of 0.2 s: 135 s.
- larger: as the table: 8 s, 48 GB pinned in 16 s, 8 steps of 3 to 4 s: 55 s; four of them 220 s.

A call of 9.5 minutes has all until `profile` (200 s) and the first one or two rounds of the table, a second one the
rest of the table, `windows` and `cost`, a third one the others.
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
        needs_s: Approximate duration; the step is not started with less time left. If it continues, of its first part.
        limit_s: Time limit.
        options: Options of the script.
        reads: Files of earlier steps that it reads.
        continues: Whether it stops before the time is over, and continues in the next call where it stopped.
        rehearse_s: Time limit in a rehearsal.
    """

    name: str
    about: str
    script: str
    needs_s: float
    limit_s: float
    options: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    continues: bool = False
    rehearse_s: float = 1200.0

    @property
    def command(self) -> tuple[str, ...]:
        return (str(STEPS / self.script), *self.options)


MACHINE = ("machine.json",)
# DeepSpeed would need 130 GB of host memory at 4 G parameters.
FITTING = ("ebbtide none", "ebbtide both", "ebbtide forward", "torch fused AdamW")
ALL = (
    BenchmarkStep("imports", "imports of all other steps", "imports.py", 15, 60),
    BenchmarkStep("smoke", "20 M parameters in every mode, with real backwards", "smoke.py", 60, 150),
    BenchmarkStep("memory", "host memory: rates of filling and pinning", "memory.py", 20, 60),
    BenchmarkStep(
        "calibrate", "rates of the machine; link counters against copies of known size", "calibrate.py", 55, 100
    ),
    BenchmarkStep("profile", "a recorded job against its own measurements", "recorded.py", 40, 100),
    BenchmarkStep(
        "table",
        "optimizers on one model of 1.5 G parameters, in turn",
        "table.py",
        80,
        900,
        ("--params", "1.5e9", "--rounds", "3"),
        continues=True,
    ),
    BenchmarkStep(
        "windows", "long sequences: state parked in windows of free memory", "windows.py", 170, 260, reads=MACHINE
    ),
    BenchmarkStep("cost", "cost of recording", "cost.py", 135, 200),
    BenchmarkStep(
        "larger",
        "the same as the table at 4 G parameters, for those that fit",
        "table.py",
        80,
        500,
        ("--params", "4e9", "--rounds", "1", *(f"--contestant={name}" for name in FITTING)),
        continues=True,
    ),
    BenchmarkStep("suite", "tests that need a GPU", "suite.py", 110, 200),
    BenchmarkStep(
        "predictions",
        "policies at 1.5 G parameters: measured and predicted",
        "policies.py",
        210,
        300,
        ("--params", "1.5e9", "--iterations", "8"),
        reads=MACHINE,
    ),
    BenchmarkStep("layers", "weights and activations of layers that move", "layers.py", 100, 240),
)
