"""Lists the calls, each with its minutes and its steps, in the order in which they run,
with their time limits.

Two calls share a lease of 15 minutes. In the first: whether anything breaks, then the
machine and the recorder. In the second: the one table, windows and the cost of
recording. The others are for two more leases. Durations assume one GPU with PCIe 5 (50
GB/s per direction) and 16 cores (1 G parameters/s updated, 3 GB/s pinned; each process
starts with 8 s of imports and CUDA). State is 12 bytes per parameter:

- smoke: 14 processes of 8 to 15 s, four at a time; compute-sanitizer runs beside them:
  90 s.
- table: a process per contestant and round: 8 s, 18 GB pinned in 6 s (DeepSpeed 40 GB
  and more, with 12 s for its engine), 8 steps of 0.3 to 2 s: 20 s, with DeepSpeed 50 s;
  four of them 110 s a round. It continues in the next call.
- cpu-adam: compiles while the first contestants, which need few cores, run.
- windows: 2 runs of 12 s, 15 GB pinned in 5 s and 8 iterations of 4.5 s: 115 s.
- suite: five recorded jobs of 15 s, a calibration of 20 s: 110 s.
- predictions: one process per policy: 8 s, 15 s for the model (made on the host by one
  thread), 18 GB pinned in 6 s, 8 iterations of 1 to 2 s: 42 s; five of them 210 s.
- layers: ten runs in one process, each 4 s for the model and 10 iterations of 0.5 s:
  100 s.
- cost: 3 runs a round of 8 s and 32 iterations of 0.2 s: 45 s.
- larger: as the table: 8 s, 48 GB pinned in 16 s, 8 steps of 3 to 4 s: 55 s; four of
  them 220 s.
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
        needs_s: Approximate duration; the step is not started with less time left. If
            it continues, of its first part.
        limit_s: Time limit.
        options: Options of the script.
        reads: Files of earlier steps that it reads.
        continues: Whether it stops before the time is over, and continues in the next
            call where it stopped.
        beside: Whether it runs beside all other steps of its call, from the first
            second, and again in each call.
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
    beside: bool = False
    rehearse_s: float = 1200.0

    @property
    def command(self) -> tuple[str, ...]:
        return (str(STEPS / self.script), *self.options)


@dataclass(frozen=True)
class Call:
    """One call of run.py.

    Attributes:
        about: Description of the call.
        minutes: Its time limit.
        steps: Its steps.
    """

    about: str
    minutes: float
    steps: tuple[BenchmarkStep, ...]


MACHINE = ("machine.json",)
OFFLOAD = "ZeRO-Offload"
# The compiler works beside the first one, which needs few cores. A round ends with the
# one that is compiled.
FIRST = ("torch fused AdamW", "ebbtide none", "ebbtide both", OFFLOAD)
OTHERS = ("ebbtide both", OFFLOAD, "ebbtide forward", "SuperOffload", "torchao")
# DeepSpeed would need 130 GB of host memory at 4 G parameters.
FITTING = ("ebbtide none", "ebbtide both", "ebbtide forward", "torch fused AdamW")


def _contestants(params: str, rounds: int, names: tuple[str, ...]) -> tuple[str, ...]:
    return (
        "--params",
        params,
        "--rounds",
        str(rounds),
        *(f"--contestant={name}" for name in names),
    )


COMPILE = BenchmarkStep(
    "cpu-adam", "DeepSpeed's CPU Adam compiles", "cpu_adam.py", 20, 160, beside=True
)
CALLS = {
    "first": Call(
        "what breaks; the machine; the recorder",
        4.5,
        (
            BenchmarkStep(
                "imports", "imports of all other steps", "imports.py", 15, 30
            ),
            BenchmarkStep(
                "smoke",
                "20 M parameters in every mode, with real backwards",
                "smoke.py",
                60,
                110,
                ("--tool=memcheck",),
            ),
            BenchmarkStep(
                "kernels",
                "tests of the Triton kernels",
                "suite.py",
                15,
                40,
                ("--file=test_triton_kernel.py",),
            ),
            BenchmarkStep(
                "memory",
                "host memory: rates of filling and pinning",
                "memory.py",
                10,
                30,
                ("--fill=20e9",),
            ),
            BenchmarkStep(
                "calibrate",
                "rates of the machine; link counters against copies of known size",
                "calibrate.py",
                30,
                60,
                ("--calibration-seconds=15",),
            ),
            BenchmarkStep(
                "profile",
                "a recorded job against its own measurements",
                "recorded.py",
                30,
                60,
                ("--steps=10",),
            ),
        ),
    ),
    "second": Call(
        "the table; windows; the cost of recording",
        6.5,
        (
            COMPILE,
            BenchmarkStep(
                "table",
                "optimizers on one model of 1.5 G parameters, in turn",
                "table.py",
                80,
                235,
                _contestants("1.5e9", 2, FIRST),
                continues=True,
            ),
            BenchmarkStep(
                "windows",
                "long sequences: state parked in windows of free memory",
                "windows.py",
                90,
                140,
                ("--run=adaptive, by phase", "--run=zero-offload"),
                reads=MACHINE,
            ),
            BenchmarkStep(
                "cost", "cost of recording", "cost.py", 40, 70, ("--rounds=1",)
            ),
        ),
    ),
    "third": Call(
        "the tests that need a GPU; predictions; layers",
        8.0,
        (
            BenchmarkStep("suite", "tests that need a GPU", "suite.py", 110, 200),
            BenchmarkStep(
                "predictions",
                "policies at 1.5 G parameters: measured and predicted",
                "policies.py",
                210,
                300,
                ("--params=1.5e9", "--iterations=8"),
                reads=MACHINE,
            ),
            BenchmarkStep(
                "layers",
                "weights and activations of layers that move",
                "layers.py",
                100,
                240,
            ),
        ),
    ),
    "fourth": Call(
        "the other optimizers; the kernels under racecheck; the cost of recording in "
        "three rounds",
        8.0,
        (
            COMPILE,
            BenchmarkStep(
                "others",
                "the other optimizers of the table, beside two of them",
                "table.py",
                80,
                240,
                _contestants("1.5e9", 1, OTHERS),
                continues=True,
            ),
            BenchmarkStep(
                "racecheck",
                "as smoke, the kernels under racecheck",
                "smoke.py",
                60,
                110,
                ("--tool=racecheck",),
            ),
            BenchmarkStep(
                "costs", "cost of recording, in three rounds", "cost.py", 135, 200
            ),
        ),
    ),
    "fifth": Call(
        "the table at 4 G parameters; all runs of windows",
        8.0,
        (
            BenchmarkStep(
                "larger",
                "the same as the table at 4 G parameters, for those that fit",
                "table.py",
                80,
                280,
                _contestants("4e9", 1, FITTING),
                continues=True,
            ),
            BenchmarkStep(
                "always-free",
                "windows beside the memory that is always free",
                "windows.py",
                170,
                260,
                reads=MACHINE,
            ),
        ),
    ),
}
ALL = tuple(
    {step.name: step for call in CALLS.values() for step in call.steps}.values()
)
