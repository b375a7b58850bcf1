"""Settings that findings may advise: they are those of the recommendation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.advice import Adviser
from ebbtide.features.advise.recommendation import recommend
from ebbtide.features.advise.trace_advice import TraceAdviser
from ebbtide.interleave.replay.inputs import own_machine
from ebbtide.interleave.replay.recorded_job import recorded_job
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.machines.catalog import preset
from ebbtide.profiler.trace import TraceBuilder, open_trace
from tests.interleave.published import TRACES


def test_trace_adviser__has_the_settings_of_the_recommendation() -> None:
    trace = open_trace(TRACES / "a100-13b-async.ebb")
    adviser: Adviser = TraceAdviser(trace)
    advice = recommend(
        workload_of(trace),
        preset("a100-40gb-published").for_ranks(4),
        recorded_job(trace),
    )
    split = adviser.split_advice()
    assert split is not None
    assert advice.deepspeed is not None
    assert split.settings == {
        "offload_optimizer": advice.deepspeed["offload_optimizer"]
    }
    assert (
        f'"offload_optimizer": {{"ratio": '
        f"{advice.deepspeed['offload_optimizer']['ratio']:g}}}" in split.text
    )
    assert any(
        finding.advice == split.text for finding in find(trace, adviser).findings
    )
    assert split.gain_ms > 0


def test_trace_adviser__advises_not_to_offload_state_that_fits() -> None:
    adviser = TraceAdviser(open_trace(TRACES / "h100-20b-async.ebb"))
    setting = adviser.split_advice()
    assert setting is not None
    assert setting.settings == {"offload_optimizer": {"device": "none"}}
    assert setting.ends_offload
    assert setting.text.startswith("do not offload at all (simulated: ")


def test_trace_adviser__ends_offload_where_gpu_and_cpu_share_one_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job offloads, and its state would not fit beside it if the host's memory were
    another one."""
    unified = replace(preset("a100-40gb-published"), unified_memory=True)
    monkeypatch.setattr(
        "ebbtide.interleave.replay.inputs.own_machine", lambda trace: unified
    )
    trace = open_trace(TRACES / "a100-13b-async.ebb")
    adviser = TraceAdviser(trace)
    setting = adviser.split_advice()
    assert setting is not None
    assert setting.ends_offload
    assert "share one memory" in setting.text
    advices = [finding.advice for finding in find(trace, adviser).findings]
    assert sum("share one memory" in advice for advice in advices) == 1


def test_trace_adviser__says_nothing_of_a_job_that_cannot_be_simulated() -> None:
    builder = TraceBuilder("recorded")
    builder.rank(
        0,
        devices=[
            {
                "device": "cuda:0",
                "kind": "cuda",
                "name": "a device",
                "capacity_bytes": 10**10,
            }
        ],
    )
    trace = builder.build()
    assert own_machine(trace) is None
    assert TraceAdviser(trace).split_advice() is None
