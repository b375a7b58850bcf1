"""Recording of ZeRO-Infinity: real DeepSpeed jobs whose optimizer state is in files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import Findings, find
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.storage_use import storage_use
from ebbtide.analysis.metrics.substeps.breakdown import sub_steps
from ebbtide.analysis.timeline.boxes import substep_lanes
from ebbtide.features.deepspeed.setup import deepspeed_of
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.profiler import open_trace
from ebbtide.profiler.trace import Trace
from tests import torch_extensions
from tests.conftest import run_process, shared_folder
from tests.features.deepspeed.agent.test_deepspeed import (
    BF16,
    JOB,
    cases_file,
    environment,
    job,
)

pytestmark = pytest.mark.slow

WIDTH = 512
# Two linear layers with biases, in each of four blocks; a subgroup has a block.
BLOCK = 4 * WIDTH**2 + 3 * WIDTH
SUBGROUPS = 4
STEPS = 5
MIB = 2**20
UNPATCHED = """
from deepspeed.ops.op_builder import AsyncIOBuilder
assert not hasattr(AsyncIOBuilder().load().aio_handle.wait, "__wrapped__")
"""
PIPELINED = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}


def case(
    folder: Path, name: str, block_size: int, swapping: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    """Return a case of zero_job.py whose optimizer state is in a folder."""
    nvme = {
        "device": "nvme",
        "nvme_path": str(folder / name),
        "pin_memory": False,
        **swapping,
    }
    config = {**BF16, "aio": {"block_size": block_size}}
    zero = {
        "offload_optimizer": nvme,
        "sub_group_size": BLOCK,
        "stage3_param_persistence_threshold": 0,
    }
    return job(name, 3, zero, config=config, width=WIDTH, **keys)


@dataclass
class SwappedJob:
    """A job that was trained without and with the recorder.

    Attributes:
        losses: Printed losses, without and with the recorder.
        trace: The recording.
        findings: Its findings, and the rules that found nothing.
    """

    losses: list[str]
    trace: Trace
    findings: Findings

    @property
    def findings_by_rule(self) -> dict[str, Any]:
        return {finding.rule: finding for finding in self.findings.findings}


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, deepspeed_extensions: None
) -> dict[str, SwappedJob]:
    missing = torch_extensions.missing_storage_requirement()
    if missing:
        pytest.skip(missing)
    folder = shared_folder(tmp_path_factory, "infinity", train_all)
    losses = [
        line
        for line in (folder / "stdout").read_text().splitlines()
        if line.startswith("LOSSES")
    ]
    jobs = {}
    for name in dict.fromkeys(line.split()[1] for line in losses):
        trace = open_trace(folder / f"{name}.ebb")
        jobs[name] = SwappedJob(
            [line for line in losses if line.split()[1] == name], trace, find(trace)
        )
    return jobs


def train_all(folder: Path) -> None:
    checkpoint = str(folder / "checkpoint")
    first = [
        case(folder, "default", MIB, {}),
        case(folder, "pipelined", 3 * MIB, PIPELINED, save=checkpoint, after=UNPATCHED),
    ]
    printed = ""
    for cases in (
        first,
        [case(folder, "resumed", 3 * MIB, PIPELINED, load=checkpoint)],
    ):
        out = run_process(
            [sys.executable, JOB, cases_file(folder, cases, folder)], env=environment()
        )
        assert out.returncode == 0, out.stderr[-3000:]
        printed += out.stdout
    (folder / "stdout").write_text(printed)


def test_recorder__does_not_change_a_bit_of_the_losses(
    jobs: dict[str, SwappedJob],
) -> None:
    assert list(jobs) == ["default", "pipelined", "resumed"]
    for name, (bare, recorded) in (
        (name, swapped.losses) for name, swapped in jobs.items()
    ):
        assert bare == recorded, name
        assert len(set(bare.split()[4:])) == STEPS


def test_ops__have_reads_and_writes_of_each_subgroup_and_tile_the_update(
    jobs: dict[str, SwappedJob],
) -> None:
    for name, swapped in jobs.items():
        ops = swapped.trace.ops(0)
        on_storage = ops["resource"].str.startswith("storage")
        top = ops[ops["parent"].isna() & ~on_storage]
        for update in swapped.trace.phases(0).query("phase == 'update'").itertuples():
            rows = top[
                top["start_ns"].ge(update.start_ns) & top["end_ns"].le(update.end_ns)
            ]
            assert [update.start_ns, *rows["end_ns"]] == [
                *rows["start_ns"],
                update.end_ns,
            ]
        steady = ops[ops["iteration"].between(1, STEPS - 1)]
        for kind in ("read", "write"):
            rows = steady[steady["name"] == kind]
            assert set(rows["resource"]) == {f"storage_{kind}"}
            assert rows["subgroup"].to_list() == [*range(SUBGROUPS)] * (STEPS - 1), name
            # fp32 parameter and two moments, rounded up to the blocks that DeepSpeed
            # aligns to.
            assert rows["bytes"].to_numpy() == pytest.approx(12 * BLOCK, rel=0.01)
        waits = steady[steady["name"] == "wait"]
        assert set(waits["resource"]) == {"host"}
        assert [lane for lane, _ in substep_lanes(swapped.trace, 0)] == [
            "sub-steps",
            "storage_read",
            "storage_write",
        ]
        assert sub_steps(swapped.trace).tiles


def test_pipelined_reads__are_in_flight_during_the_update_of_the_subgroup_before(
    jobs: dict[str, SwappedJob],
) -> None:
    overlapping = {}
    for name in ("default", "pipelined"):
        ops = jobs[name].trace.ops(0)
        updates, reads = (
            ops[(ops["name"] == kind) & ops["iteration"].gt(0)]
            for kind in ("update", "read")
        )
        pairs = updates.merge(
            reads.assign(subgroup=reads["subgroup"] - 1), on=["iteration", "subgroup"]
        )
        assert len(pairs) == (STEPS - 1) * (SUBGROUPS - 1)
        overlapping[name] = (pairs["start_ns_y"] < pairs["start_ns_x"]) & (
            pairs["end_ns_y"] > pairs["end_ns_x"]
        )
    assert overlapping["pipelined"].all()
    assert not overlapping["default"].any()


def test_storage_use__counts_bytes_gradients_and_waits(
    jobs: dict[str, SwappedJob],
) -> None:
    state = 12 * BLOCK * SUBGROUPS
    for name, gradients in (
        ("default", 4 * 4 * WIDTH**2 * SUBGROUPS),
        ("pipelined", 0),
    ):
        read, write = storage_use(jobs[name].trace)
        for use in (read, write):
            assert use.gradient_bytes == gradients
            assert use.bytes == pytest.approx(state + gradients, rel=0.01)
            assert use.wait_ms is not None
            assert 0 < use.wait_ms <= use.in_flight_ms


def test_findings__hold_where_their_cause_is_and_not_elsewhere(
    jobs: dict[str, SwappedJob],
) -> None:
    default, pipelined, resumed = (
        jobs[name] for name in ("default", "pipelined", "resumed")
    )
    for swapped in (default, pipelined, resumed):
        metrics = JobMetrics(swapped.trace)
        assert ("storage-waits" in swapped.findings_by_rule) == (
            metrics.storage[0].wait_ms >= 0.1 * metrics.iteration_ms
        )
    assert {
        "gradients-on-storage",
        "few-swap-buffers",
    } <= default.findings_by_rule.keys()
    assert "lost-moments" not in default.findings_by_rule
    assert (
        not {"gradients-on-storage", "few-swap-buffers", "lost-moments"}
        & pipelined.findings_by_rule.keys()
    )
    assert {"gradients-on-storage", "few-swap-buffers", "lost-moments"} <= {
        *pipelined.findings.nothing_found
    }
    assert "lost-moments" in resumed.findings_by_rule
    assert str(4 * BLOCK) in default.findings_by_rule[
        "gradients-on-storage"
    ].advice.replace(",", "")
    assert (
        deepspeed_of(default.trace).info.largest_stored_gradient_bytes
        == 4 * 2 * WIDTH**2
    )


def test_workload__has_the_host_memory_of_the_buffers(
    jobs: dict[str, SwappedJob],
) -> None:
    workload = workload_of(jobs["pipelined"].trace)
    assert workload.host_free_bytes == pytest.approx(
        12 * 4 * BLOCK + 8 * BLOCK * SUBGROUPS, rel=0.01
    )
