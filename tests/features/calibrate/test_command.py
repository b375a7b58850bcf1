"""`ebbtide calibrate`, end to end, on this machine and from traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import load_machine
from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import Run, ebbtide, ebbtide_in_process

HOST = (
    "host_memory_bytes",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
    "cpu_out_of_place_share",
    "cpu_remainder_ratio",
    "cpu_cast_params_per_s",
    "cpu_norm_params_per_s",
    "operation_s",
)
CARD = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_bytes_per_s",
    "gpu_update_params_per_s",
    "step_overhead_s",
)
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests a machine without a GPU"
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    path = tmp_path_factory.mktemp("measured") / "host.json"
    return ebbtide(
        "calibrate", "--seconds", "1", "--name", "host", "-o", path, "--json"
    ), path


def test_calibrate__writes_a_machine_file_and_prints_only_that(
    measured: tuple[Run, Path],
) -> None:
    run, path = measured
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result == json.loads(path.read_text())
    machine = load_machine(path)
    assert machine.name == "host"
    for key in HOST:
        rate = getattr(machine, key)
        assert rate > 0
        assert math.isfinite(rate)
        assert machine.extra["measured"][key]["how"]
    assert machine.extra["cpu_update"]["threads"] == 1
    # Without rates of the link it cannot be used for a replay.
    hint = (
        f"ebbtide replay RUN.ebb --machine {path}"
        if result["h2d_bytes_per_s"]
        else "use a preset"
    )
    assert hint in run.stderr


def test_calibrate__host_bandwidth_covers_the_traffic_of_the_update(
    measured: tuple[Run, Path],
) -> None:
    machine = load_machine(measured[1])
    assert machine.host_memory_bytes_per_s is not None
    assert machine.cpu_update_params_per_s is not None
    assert machine.host_memory_bytes_per_s >= 28 * machine.cpu_update_params_per_s


def test_calibrate__notes_threads_that_the_environment_sets(
    measured: tuple[Run, Path],
) -> None:
    machine = load_machine(measured[1])
    has_note = any(
        note.startswith("OMP_NUM_THREADS=1") for note in machine.extra["notes"]
    )
    # The command's environment here sets one thread.
    assert has_note == (
        "threads: 1," in machine.extra["measured"]["cpu_update_params_per_s"]["how"]
        and _cores() > 1
    )


def _cores() -> int:
    from ebbtide.host_limits import cores

    return cores()


@without_gpu
def test_calibrate__without_a_gpu_its_rates_are_null_and_there_is_a_note(
    measured: tuple[Run, Path],
) -> None:
    run, path = measured
    result = json.loads(path.read_text())
    assert {key: result[key] for key in (*CARD, "gpu_memory_bytes")} == dict.fromkeys(
        (*CARD, "gpu_memory_bytes")
    )
    assert "there is no GPU here" in run.stderr
    assert any("there is no GPU here" in note for note in result["notes"])


def test_calibrate__has_no_progress_bar_without_a_terminal(
    measured: tuple[Run, Path],
) -> None:
    stderr = measured[0].stderr
    assert all(message.startswith("ebbtide: ") for message in stderr.splitlines()), (
        stderr
    )
    assert "\x1b" not in stderr


@without_gpu
@pytest.mark.slow
def test_calibrate__the_slowest_rank_counts(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    run = ebbtide("calibrate", "--seconds", "1", "--ranks", "2", "-o", path)
    assert run.returncode == 0, run.stderr
    assert "rates of one rank while 2 update on its host" in run.stdout
    machine = load_machine(path)
    ranks = machine.extra["ranks"]
    assert ranks["count"] == 2
    for key in HOST:
        assert len(ranks["each"][key]) == 2
        slowest = max if key == "operation_s" else min
        assert getattr(machine, key) == slowest(ranks["each"][key])
    box = machine.box
    assert box is not None
    assert box.ranks == 2
    for key in ("cpu_update_params_per_s", "host_memory_bytes_per_s"):
        assert getattr(box, key) == sum(ranks["each"][key])
        assert getattr(box, f"one_rank_{key}") > 0


JOB = Workload(
    "job",
    params=1_000_000_000,
    subgroup_params=100_000_000,
    forward_s=0.2,
    backward_s=0.5,
    other_s=0.1,
)


def write_trace(
    path: Path, name: str, capacity: int = 80 * 2**30, **offload: Any
) -> Path:
    """Write the trace of a job of 1e9 parameters whose phases take the times of a
    preset machine."""
    config = {
        "gradient_clipping": 1.0,
        "zero_optimization": {"sub_group_size": JOB.subgroup_params},
    }
    policy = "zero-offload"
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu",
            "part_grads_async": True,
            **offload,
        }  # type: ignore[index]
        if offload.get("prefetch_optimizer"):
            policy = f"interleaved:{offload['prefetch_optimizer_gap']}"
    machine = preset("h100-80gb-sxm-published")
    schedule = simulate(make_plan(policy, JOB, machine), JOB, machine)
    lengths = {
        "forward": schedule.forward_s,
        "backward": schedule.backward_s,
        "update": schedule.update_s,
    }
    builder = TraceBuilder(
        "recorded", deepspeed={"config": config, "version": "0.19.5"}
    )
    device = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": capacity}
    rank = builder.rank(
        0,
        devices=[device],
        optimizers=[{"params": JOB.params}],
        first_iteration_start_ns=0,
    )
    now = 0
    for iteration in range(4):
        now += round(JOB.other_s * 1e9)
        for phase, seconds in lengths.items():
            rank.phase(phase, now, now + round(seconds * 1e9), iteration)
            now += round(seconds * 1e9)
    builder.write(path / f"{name}.ebb")
    return path / f"{name}.ebb"


def interleaved(stride: int) -> dict[str, Any]:
    return {"prefetch_optimizer": True, "prefetch_optimizer_gap": stride}


@pytest.mark.slow
def test_calibrate__fits_a_machine_from_traces(tmp_path: Path) -> None:
    traces = [write_trace(tmp_path, "static", ratio=1.0)]
    traces += [
        write_trace(tmp_path, f"every-{stride}", **interleaved(stride))
        for stride in (2, 5)
    ]
    arguments = [word for path in traces for word in ("--from-trace", path)]
    run = ebbtide_in_process("calibrate", *arguments, "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result == json.loads((tmp_path / "fitted.json").read_text())
    assert result["gpu_memory_bytes"] == 80 * 2**30
    assert (result["host_memory_bytes"], result["duplex_bytes_per_s"]) == (None, None)
    fit = result["fit"]
    assert list(fit["residuals"]) == ["static", "every-2", "every-5"]
    assert max(map(abs, fit["residuals"].values())) < 0.01
    assert fit["rates"] == {key: result[key] for key in fit["rates"]}
    assert fit["rates"].keys() >= fit["uncertainty"].keys()
    assert fit["policies"]["every-2"] == "interleaved:2@1,grads=async"
    # Traces without blocking copies do not determine the rate of pageable copies to the
    # host.
    assert "d2h_pageable_bytes_per_s" in fit["unidentified"]
    assert set(fit["unidentified"]) <= set(fit["uncertainty"])
    assert "measured" not in result

    run = ebbtide_in_process("calibrate", *arguments, "--force", "-v", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "not determined by" in run.stdout
    assert "interleaved:5@1,grads=async" in run.stdout
    assert f"ebbtide replay {traces[0]} --machine fitted.json" in run.stderr
    replayed = ebbtide_in_process(
        "replay",
        traces[0],
        "--machine",
        "fitted.json",
        "--policy",
        "interleaved:3",
        "--json",
        cwd=tmp_path,
    )
    assert replayed.returncode == 0, replayed.stderr


def test_calibrate__says_how_accurate_predictions_are(
    measured: tuple[Run, Path], tmp_path: Path
) -> None:
    assert "not validated against a run" in measured[0].stderr
    trace = write_trace(tmp_path, "static", ratio=1.0)
    run = ebbtide_in_process(
        "calibrate", "--from-trace", trace, "-o", tmp_path / "m.json"
    )
    assert run.returncode == 0, run.stderr
    assert "% on the 1 run it was fitted to\n" in run.stderr
    assert "ebbtide: not determined by the runs: " in run.stderr
    # One run cannot tell the overhead of a step from rates.
    assert "stand on one size" in " ".join(run.stderr.split())


@pytest.mark.slow
def test_calibrate__traces_with_the_same_name_are_named_by_their_paths(
    tmp_path: Path,
) -> None:
    paths = []
    for folder, offload in (("a", {"ratio": 1.0}), ("b", interleaved(2))):
        (tmp_path / folder).mkdir()
        paths.append(write_trace(tmp_path / folder, "run", **offload))
    out = tmp_path / "m.json"
    run = ebbtide_in_process(
        "calibrate", "--from-trace", paths[0], "--from-trace", paths[1], "-o", out
    )
    assert run.returncode == 0, run.stderr
    assert list(load_machine(out).extra["fit"]["residuals"]) == [
        str(path) for path in paths
    ]


def assert_refused(run: Run, *messages: str) -> None:
    """Assert that a command refused its input: one line, nothing else, exit code 2."""
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert all(message in run.stderr for message in messages), run.stderr


def test_calibrate__bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    plain = write_trace(tmp_path, "plain")
    small = write_trace(tmp_path, "small", capacity=40 * 2**30, ratio=1.0)
    large = write_trace(tmp_path, "large", ratio=1.0)
    (tmp_path / "taken.json").write_text("kept")
    before = sorted(tmp_path.iterdir())
    assert_refused(
        ebbtide_in_process("calibrate", "--from-trace", plain, cwd=tmp_path),
        "plain.ebb does not record how it was offloaded",
    )
    assert_refused(
        ebbtide_in_process(
            "calibrate", "--from-trace", tmp_path / "none.ebb", cwd=tmp_path
        ),
        "none.ebb",
    )
    two = ("--from-trace", small, "--from-trace", large)
    assert_refused(
        ebbtide_in_process("calibrate", *two, cwd=tmp_path),
        "GPUs of different size (40.00 GiB, 80.00 GiB)",
    )
    assert_refused(
        ebbtide_in_process(
            "calibrate", "--from-trace", large, "--ranks", "2", cwd=tmp_path
        ),
        "--ranks",
    )
    assert_refused(
        ebbtide_in_process("calibrate", "-o", "taken.json", cwd=tmp_path),
        "taken.json exists already",
    )
    assert_refused(
        ebbtide_in_process("calibrate", "-o", "taken.json/where.json", cwd=tmp_path),
        "taken.json/where.json",
    )
    for option, value in (("--ranks", "0"), ("--seconds", "0"), ("--seconds", "soon")):
        assert_refused(
            ebbtide_in_process("calibrate", option, value, cwd=tmp_path), option
        )
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "taken.json").read_text() == "kept"
