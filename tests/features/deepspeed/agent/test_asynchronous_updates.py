"""Recording of SuperOffload, whose updates run in another process, and the phases of
ZenFlow."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ebbtide.analysis.metrics.substeps.breakdown import sub_steps
from ebbtide.analysis.timeline.boxes import substep_lanes
from ebbtide.features.deepspeed.agent.phase_hooks import wrap_receive, wrap_worker
from ebbtide.features.deepspeed.setup import deepspeed_of
from tests.conftest import Recorded, ebbtide, run_process, shared_folder
from tests.features.deepspeed.agent.test_deepspeed import (
    BF16,
    CPU,
    JOB,
    OFFLOAD,
    ZENFLOW,
    cases_file,
    environment,
    job,
)

STEPS = 5
# Of each case, without its first iteration, which starts processes, and its last: to it
# belongs the first update of the next engine, as the second optimizer of a GAN would.
WHOLE = STEPS - 2
SUPER = {"offload_optimizer": {**CPU, "super_offload": True}}
OVERLAPPED = {"zenflow": {**ZENFLOW, "overlap_step": True}}
UNCLIPPED = {"gradient_clipping": 0.0}
CASES = [
    job("SuperOffload", 3, SUPER, lifted=True, config=BF16 | UNCLIPPED),
    job("SuperOffload clipped", 3, SUPER, lifted=True, config=BF16),
    job("ZenFlow", 2, OFFLOAD | OVERLAPPED, 2, config=BF16),
    # Last, since NaN slows the arithmetic down.
    job(
        "SuperOffload overflow", 3, SUPER, lifted=True, spike=2, config=BF16 | UNCLIPPED
    ),
]
NAMES = [case["name"] for case in CASES]
SUBGROUPS = [0, 1, 2]


def first_iteration(name: str) -> int:
    return NAMES.index(name) * (STEPS - 1)


@dataclass
class AsynchronousRun:
    """All cases, trained one after the other in one process that is recorded, and in
    one that is not.

    Attributes:
        losses: Output by name of the case, without and with the recorder.
        recorded: The recording.
    """

    losses: list[dict[str, str]]
    recorded: Recorded

    def rows(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """Return the rows of a case's whole iterations."""
        first = first_iteration(name)
        return table[table["iteration"].between(first + 1, first + WHOLE)]

    def ops(self, name: str, *names: str) -> pd.DataFrame:
        rows = self.rows(self.recorded.trace.ops(0), name)
        return rows[rows["name"].isin(names)] if names else rows

    def phases(self, name: str) -> pd.DataFrame:
        return self.rows(self.recorded.trace.phases(0), name)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, deepspeed_extensions: None
) -> AsynchronousRun:
    folder = shared_folder(tmp_path_factory, "asynchronous", train_all)
    texts = [(folder / f"{name}.txt").read_text() for name in ("bare", "recorded")]
    losses = [
        {
            text.split(" 0 ")[0]: text
            for text in output.splitlines()
            if text.startswith("LOSSES")
        }
        for output in texts
    ]
    return AsynchronousRun(losses, Recorded(None, folder / "run.ebb"))  # type: ignore[arg-type]


def train_all(folder: Path) -> None:
    command = [
        sys.executable,
        str(JOB),
        cases_file(folder, [{**case, "steps": STEPS} for case in CASES]),
    ]
    root = {"PYTHONPATH": str(Path(__file__).parents[4])}
    bare = run_process(command, env=environment() | root)
    recorded = ebbtide(
        "profile",
        "-o",
        folder / "run.ebb",
        "--",
        *command,
        cwd=folder,
        env=environment() | root,
    )
    for name, out in (("bare", bare), ("recorded", recorded)):
        assert out.returncode == 0, out.stderr[-3000:]
        (folder / f"{name}.txt").write_text(out.stdout)


@pytest.mark.slow
def test_recorder__does_not_change_a_bit_of_the_losses(run: AsynchronousRun) -> None:
    bare, recorded = run.losses
    assert bare == recorded
    assert list(bare) == [f"LOSSES {name}" for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_phases_and_substeps__tile_as_in_any_other_job(
    name: str, run: AsynchronousRun
) -> None:
    phases, ops = run.phases(name), run.ops(name)
    accumulation = CASES[NAMES.index(name)]["accumulation"]
    expected = [*["forward", "backward"] * accumulation, "update"]
    assert [list(rows["phase"]) for _, rows in phases.groupby("iteration")] == [
        expected
    ] * WHOLE
    top = ops[ops["parent"].isna() & ops["resource"].ne("worker")]
    for update in phases.query("phase == 'update'").itertuples():
        rows = top[
            top["start_ns"].ge(update.start_ns) & top["end_ns"].le(update.end_ns)
        ]
        assert [update.start_ns, *rows["end_ns"]] == [*rows["start_ns"], update.end_ns]


@pytest.mark.slow
def test_super_offload__updates_in_its_worker_while_the_backward_continues(
    run: AsynchronousRun,
) -> None:
    phases, updates = (
        run.phases("SuperOffload"),
        run.ops("SuperOffload", "update", "rollback"),
    )
    assert set(updates["resource"]) == {"worker"}
    # The last subgroup's gradients are complete first.
    assert updates["subgroup"].to_list() == SUBGROUPS[::-1] * WHOLE
    for iteration, rows in updates.groupby("iteration"):
        backward, update = (
            phases.query(f"iteration == {iteration} and phase == '{p}'")
            for p in ("backward", "update")
        )
        assert rows["start_ns"].iloc[0] < backward["end_ns"].item()
        assert rows["end_ns"].iloc[-1] <= update["end_ns"].item()
        assert (rows["end_ns"].to_numpy()[:-1] <= rows["start_ns"].to_numpy()[1:]).all()
    parameters = run.ops("SuperOffload", "parameters")
    assert parameters["subgroup"].to_list() == SUBGROUPS * WHOLE
    down = run.ops("SuperOffload", "gradient down")
    params = sum(deepspeed_of(run.recorded.trace).info.subgroup_params)
    assert down["bytes"].sum() == (2 + 4) * params * WHOLE


@pytest.mark.slow
def test_super_offload__waits_for_each_subgroup_if_it_clips(
    run: AsynchronousRun,
) -> None:
    waits, updates = (
        run.ops("SuperOffload clipped", name) for name in ("wait", "update")
    )
    waits = waits[waits["subgroup"].notna()]
    assert (
        waits["subgroup"].to_list()
        == updates["subgroup"].to_list()
        == SUBGROUPS * WHOLE
    )
    assert (waits["start_ns"].to_numpy() <= updates["start_ns"].to_numpy()).all()
    assert (waits["end_ns"].to_numpy() >= updates["end_ns"].to_numpy()).all()


@pytest.mark.slow
def test_super_offload__rolls_a_step_back_that_overflows(run: AsynchronousRun) -> None:
    rows = run.ops("SuperOffload overflow", "rollback")
    # The first update of an engine belongs to the last iteration of the one before,
    # unless that is gone by then (`IterationRule`): counted from the end.
    last_iteration = int(run.recorded.trace.phases(0)["iteration"].max())
    assert set(rows["iteration"]) == {last_iteration - (STEPS - 1) + 2}
    assert sorted(rows["subgroup"]) == SUBGROUPS
    *_, spike, after, last = run.losses[0]["LOSSES SuperOffload overflow"].split()
    # DeepSpeed 0.19.8 computes the old state from the new one, where infinite gradients
    # have left NaN. The model's own parameters are as before until the next step.
    assert spike == "inf"
    assert math.isfinite(float.fromhex(after))
    assert last == "nan"


@pytest.mark.slow
def test_metadata__does_not_count_the_state_of_other_processes(
    run: AsynchronousRun,
) -> None:
    for optimizer in run.recorded.trace.rank(0).optimizers:
        assert (optimizer.state_bytes, optimizer.state_devices) == (None, ("cpu",))


@pytest.mark.slow
def test_sub_steps__show_the_worker_beside_those_of_the_job(
    run: AsynchronousRun,
) -> None:
    trace = run.recorded.trace
    steps = sub_steps(trace)
    assert steps.tiles
    assert {(step.name, step.resource) for step in steps.steps} >= {
        ("update", "worker"),
        ("parameters", "host"),
    }
    assert [lane for lane, _ in substep_lanes(trace, 0)] == ["sub-steps", "worker"]


class FakeRecorder:
    recording = True

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.notes: set[str] = set()

    def record_op(
        self, name: str, resource: str, start_ns: int, end_ns: int, subgroup: int | None
    ) -> None:
        self.rows.append((name, resource, subgroup, start_ns, end_ns))

    def note_once(self, text: str) -> None:
        self.notes.add(text)


class Optimizer:
    """The methods of SuperOffload's CPU optimizer that are wrapped, on queues within
    one process."""

    def __init__(self) -> None:
        self.tasks: queue.Queue[Any] = queue.Queue()
        self.results: queue.Queue[Any] = queue.Queue()

    def submit(self, subgroup: int, event: str) -> None:
        self.tasks.put({"sub_group_id": subgroup, "event_type": event})

    def receive(self) -> Any:
        return None if self.results.empty() else self.results.get()


def echo(tasks: Any, results: Any) -> None:
    while (task := tasks.get()) is not None:
        results.put(task)


@pytest.mark.parametrize("observed", [True, False])
def test_worker__times_each_task_and_leaves_its_result_as_it_was(
    observed: bool,
) -> None:
    recorder, optimizer = FakeRecorder(), Optimizer()
    receive = wrap_receive(recorder, Optimizer.receive)
    assert receive(optimizer) is None
    sent = [(1, "adam_step"), (0, "adam_step"), (1, "rollback")]
    for task in sent:
        optimizer.submit(*task)
    submitted_ns = time.monotonic_ns()
    optimizer.tasks.put(None)
    main = wrap_worker(echo) if observed else echo
    thread = threading.Thread(target=main, args=(optimizer.tasks, optimizer.results))
    thread.start()
    thread.join()
    results = [receive(optimizer) for _ in sent]
    assert results == [
        {"sub_group_id": subgroup, "event_type": event} for subgroup, event in sent
    ]
    rows = [("update", "worker", 1), ("update", "worker", 0), ("rollback", "worker", 1)]
    assert [row[:3] for row in recorder.rows] == (rows if observed else [])
    times = [time_ns for row in recorder.rows for time_ns in row[3:]]
    assert [submitted_ns, *times] == sorted([submitted_ns, *times])
    assert bool(recorder.notes) is not observed
