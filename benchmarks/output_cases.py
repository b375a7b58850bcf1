"""The outputs that `same_output.py` keeps: commands, plots, plans with their schedules,
and bits of training jobs."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ebbtide.cli import run  # noqa: E402
from ebbtide.errors import UserError  # noqa: E402
from ebbtide.interleave.model.schedule import Schedule  # noqa: E402
from ebbtide.interleave.policies import make_plan  # noqa: E402
from ebbtide.interleave.simulation.simulator import simulate  # noqa: E402
from ebbtide.machines.catalog import preset  # noqa: E402
from tests.features.advise.advice_checks import MACHINES, random_workload  # noqa: E402

# Name of the output -> words of the command, where T is the trace and NEXT the trace
# after it.
COMMANDS = {
    "summary": "summary T",
    "windows": "windows T",
    "windows-4GiB": "windows T --min-bytes 4GiB",
    "memory": "memory T",
    "memory-peak": "memory T --at peak",
    "link": "summary T --by link",
    "steps": "summary T --by substep -v",
    "iterations": "summary T --by iteration",
    "iterations-by-rank": "summary T --by rank",
    "activity": "activity T",
    "findings": "findings T",
    "diff": "diff T NEXT",
    "recommend-own-machine": "replay T --recommend",
}
MACHINE_COMMANDS = {
    "replay": "replay T --machine M --explain",
    "recommend": "replay T --machine M --recommend",
    "plan": "plan T --machine M",
}
PLOTS = {
    "plot": "plot T -o FILE",
    "plot-windows": "plot T --kind windows -o FILE",
    "plot-all": "plot T --kind all -o FILE",
}
POLICIES = (
    *(
        "zero-offload",
        "zero-offload,grads=blocking",
        "twin-flow:0.4",
        "pipelined",
        "interleaved:2",
    ),
    *(
        "interleaved:3@0.6",
        "pipelined,overlap=forward",
        "interleaved:2,overlap=backward",
    ),
    *("interleaved:2,overlap=both", "gpu-only", "adaptive", "adaptive,overlap=both"),
)
# What differs between two runs of the same code: identifiers of elements of a picture.
_SVG_IDS = re.compile(r'(id="|#)[a-z]+[0-9a-f]{10}')


@dataclass(frozen=True)
class Case:
    """An output: its name, and what makes its text."""

    name: str
    make: Callable[[], str]


@dataclass(frozen=True)
class Scope:
    """The traces, machines, workloads and jobs whose outputs are kept.

    `of_machines`: the commands of MACHINE_COMMANDS that run for each trace and
    machine."""

    traces: tuple[str, ...]
    machines: tuple[str, ...]
    of_machines: tuple[str, ...]
    workloads: int
    jobs: int


def all_traces() -> tuple[str, ...]:
    """Return the traces of the repository, by relative paths, which outputs name."""
    return tuple(
        sorted(f"traces/{path.name}" for path in (ROOT / "traces").glob("*.ebb"))
    )


SCOPES = {
    "quick": Scope(
        traces=(
            *(
                "traces/a100-13b-interleaved-2.ebb",
                "traces/a100-ranks2-async.ebb",
                "traces/a100-torch-profiler.ebb",
            ),
            *(
                "traces/h100-20b-async.ebb",
                "traces/h100-20b-blocking.ebb",
                "traces/h100-20b-ratio0.5-async.ebb",
            ),
        ),
        machines=("a100-40gb-published", "rtx4090"),
        of_machines=("recommend", "plan"),
        workloads=30,
        jobs=30,
    ),
    "whole": Scope(
        all_traces(),
        MACHINES,
        of_machines=tuple(MACHINE_COMMANDS),
        workloads=300,
        jobs=300,
    ),
}


def cases(scope: Scope) -> Iterator[Case]:
    """Yield the outputs of a scope."""
    for trace, after in pairwise([*scope.traces, scope.traces[0]]):
        stem = Path(trace).stem
        for name, command in COMMANDS.items():
            yield Case(
                f"{stem}.{name}", partial(command_output, command, T=trace, NEXT=after)
            )
        for name, command in PLOTS.items():
            yield Case(f"{stem}.{name}", partial(plot_output, command, trace))
        for machine in scope.machines:
            for name in scope.of_machines:
                command = MACHINE_COMMANDS[name]
                yield Case(
                    f"{stem}.{machine}.{name}",
                    partial(command_output, command, T=trace, M=machine),
                )
    for seed in range(scope.workloads):
        yield Case(f"workload-{seed}", partial(schedules_output, seed))
    for seed in range(scope.jobs):
        yield Case(f"job-{seed}", partial(job_output, seed))


def run_command(words: list[str]) -> dict[str, Any]:
    """Run a command in this process, and return its status and what it prints."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        status = run(words)
    return {"status": status, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}


def command_output(command: str, **words: str) -> str:
    """Return the screen and the JSON of a command."""
    arguments = [words.get(word, word) for word in command.split()]
    screen, values = run_command(arguments), run_command([*arguments, "--json"])
    values["stdout"] = json.loads(values["stdout"] or "null")
    screen["stdout"] = screen["stdout"].splitlines()
    return as_text({"screen": screen, "json": values})


def plot_output(command: str, trace: str) -> str:
    """Return the drawing commands of a plot."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plot.svg"
        words = {"T": trace, "FILE": str(file)}
        result = run_command([words.get(word, word) for word in command.split()])
        if result["status"]:
            return as_text({"status": result["status"], "stderr": result["stderr"]})
        return _SVG_IDS.sub(
            r"\1", re.sub(r"<dc:date>.*?</dc:date>", "", file.read_text())
        )


def schedules_output(seed: int) -> str:
    """Return the plan and the times of each policy for a random workload on a random
    machine."""
    draw = random.Random(seed)
    workload, machine = (
        random_workload(draw),
        preset(draw.choice(MACHINES)).for_ranks(1),
    )
    result = {}
    for policy in POLICIES:
        try:
            result[policy] = _fields(
                simulate(make_plan(policy, workload, machine), workload, machine)
            )
        except UserError as error:
            result[policy] = {"error": str(error)}
    return as_text(result)


def _fields(schedule: Schedule) -> dict[str, Any]:
    """Return what a schedule holds, with the operations of its plan as lists of their
    fields."""
    plan = schedule.plan
    return {
        "plan": {**asdict(plan), "ops": [op._asdict() for op in plan.ops]},
        "starts": schedule.starts,
        "ends": schedule.ends,
        "phases": [
            schedule.other_s,
            schedule.forward_s,
            schedule.backward_s,
            schedule.update_s,
        ],
    }


def job_output(seed: int) -> str:
    """Return the results of a random training job, as digests of their bits, or the
    error that it ends in."""
    # These import torch, which the other outputs do not need.
    from tests.interleave.engine.grid.draw import draw_job
    from tests.interleave.engine.grid.judge import train

    try:
        results = train(draw_job(seed), is_plain=False)
    except UserError as error:
        return as_text({"error": str(error)})
    return as_text([[name, _digest(value)] for name, value in results])


def _digest(tensor: Any) -> str:
    from tests.interleave.engine.states import bits

    return hashlib.sha256(bits(tensor).contiguous().numpy().tobytes()).hexdigest()[:16]


def as_text(value: Any) -> str:
    """Return a value as JSON with sorted keys; sets are sorted lists."""
    return json.dumps(value, indent=1, sort_keys=True, default=_sorted)


def _sorted(value: Any) -> list[Any]:
    if not isinstance(value, set | frozenset):
        raise TypeError(f"{type(value).__name__} has no place in an output")
    return sorted(value)
