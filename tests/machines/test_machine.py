"""Tests of machine files, presets, and the lookup of a machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import find_machine, preset, presets
from ebbtide.machines.machine import Machine, load_machine, machine_from
from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import slow
from tests.interleave.job_files import MACHINE, machine, workload
from tests.interleave.strategies import machines

# A cost that is not known is left out, or is part of another rate.
SHARES = ("cpu_out_of_place_share", "cpu_remainder_ratio")
OPTIONAL = (
    "gpu_cast_params_per_s",
    "cpu_norm_params_per_s",
    "operation_s",
    "pinned_memory_bytes",
    *SHARES,
)
RATES = [
    key
    for key, value in vars(Machine()).items()
    if value is None and key not in ("box", "gpu")
]


@given(machines(), st.sets(st.sampled_from(RATES)))
def test_machine_from__reads_what_as_json_wrote(
    drawn: Machine, unknown: set[str]
) -> None:
    written = replace(
        drawn, extra={"fit": {"residuals": [0.1]}}, **dict.fromkeys(unknown)
    )  # type: ignore[arg-type]
    assert machine_from(json.loads(json.dumps(written.as_json())), "file") == written


def test_machine_from__missing_and_null_values_are_not_known() -> None:
    assert machine_from({}, "m.json") == Machine(name="m.json")
    assert machine_from(dict.fromkeys(["name", *RATES]), "m.json") == Machine(
        name="m.json"
    )
    # No time at all for a step is a measurement; so is an integral float.
    assert machine_from(
        {"step_overhead_s": 0, "h2d_bytes_per_s": 50_000_000_000}, ""
    ) == Machine(name="", step_overhead_s=0.0, h2d_bytes_per_s=5e10)


IMPOSSIBLE = (
    -1,
    -1e-9,
    1e20,
    10**400,
    "fast",
    True,
    [1],
    {},
    math.inf,
    -math.inf,
    math.nan,
)
# 50 is meant as GB/s, and would be replayed as 50 bytes a second.
IN_ANOTHER_UNIT = (0, 50.0, 1e-300)


def test_machine_from__refuses_impossible_values_and_wrong_units() -> None:
    for key in RATES:
        for value in IMPOSSIBLE:
            with pytest.raises(MachineError, match=f"^m.json: {key} is .*$"):
                machine_from(MACHINE | {key: value}, "m.json")
        if key not in ("step_overhead_s", "operation_s", *SHARES):
            for value in IN_ANOTHER_UNIT:
                with pytest.raises(
                    MachineError,
                    match=f"{key} is {value:g}; it must be a number from 1e",
                ):
                    machine_from({key: value}, "m.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b'{"h2d_bytes_per_s": 5e1', "is not JSON"),
        (b'{"note": NaN}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1e9]", "is not a JSON object"),
        (b'{"name": 7}', "name is 7; it must be a text"),
        (b" " * (17 << 20), "is too large"),
        (None, "cannot be read"),
    ],
)
def test_load_machine__refuses_files_that_are_not_machines(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "m.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MachineError, match=message) as error:
        load_machine(path)
    assert "\n" not in str(error.value)
    with pytest.raises(MachineError, match="cannot be read"):
        load_machine(tmp_path)


@pytest.mark.parametrize(
    "policy",
    slow(
        [
            "zero-offload",
            "pipelined",
            "pipelined,grads=blocking",
            "twin-flow:0.5",
            "interleaved:2",
            "gpu-only",
        ],
        but=["pipelined,grads=blocking", "interleaved:2"],
    ),
)
def test_simulate__an_unknown_rate_is_an_error_or_makes_no_difference(
    policy: str,
) -> None:
    job, complete = workload(), machine(duplex_bytes_per_s=60e9, step_overhead_s=0.0)

    def seconds(**rates: float | None) -> float:
        changed = replace(complete, **rates)  # type: ignore[arg-type]
        return simulate(make_plan(policy, job, changed), job, changed).iteration_s

    unchanged = seconds()
    # Not known: no limit beyond that of each direction.
    assert seconds(duplex_bytes_per_s=None) == seconds(duplex_bytes_per_s=100e9)
    assert seconds(step_overhead_s=None) == unchanged
    for key in RATES:
        if key in ("duplex_bytes_per_s", "step_overhead_s", *OPTIONAL) or key.endswith(
            "memory_bytes"
        ):
            continue
        if (
            key == "host_memory_bytes_per_s"
            or seconds(**{key: getattr(complete, key) / 50}) != unchanged
        ):
            with pytest.raises(
                MachineError,
                match=(
                    f"machine box has no {key}, which .*: measure it with `ebbtide cal"
                ),
            ):
                seconds(**{key: None})
        else:
            assert seconds(**{key: None}) == unchanged


def test_presets__are_complete_and_name_their_source() -> None:
    assert presets()
    for name in presets():
        machine_preset = preset(name)
        assert machine_preset.name == name
        unknown = {key for key in RATES if getattr(machine_preset, key) is None}
        assert unknown <= {"duplex_bytes_per_s", *OPTIONAL}
        # It is stated how many ranks the rates of one rank are with.
        assert machine_preset.box is not None
        assert machine_preset.for_ranks(machine_preset.box.ranks) == machine_preset
        assert {"data", "how", "date"} <= set(machine_preset.extra["source"])


def test_find_machine__accepts_a_file_a_preset_or_the_recorded_machine(
    tmp_path: Path,
) -> None:
    name = presets()[0]
    file = tmp_path / "m.json"
    file.write_text(json.dumps(MACHINE))
    trace = TraceBuilder("simulated", machine=MACHINE | {"name": "recorded"}).build()
    assert find_machine(str(file), trace.meta.machine).name == "box"
    assert find_machine(name, trace.meta.machine).name == name
    assert find_machine(None, trace.meta.machine).name == "recorded"


def test_find_machine__takes_the_first_letters_of_one_name() -> None:
    assert find_machine("RTX3090").name == "rtx3090"
    with pytest.raises(MachineError, match="did you mean l40s"):
        find_machine("L40")
    assert find_machine("h100-80gb").name == "h100-80gb"
    assert find_machine("h100-80gb-s").name == "h100-80gb-sxm-published"


MISSING_MACHINES = [
    (
        None,
        "name one with --machine, a file (`ebbtide calibrate` writes it) or the name "
        "of one that `ebbtide machines` lists",
    ),
    ("", "cannot be read"),
    ("nosuch", "there is no machine 'nosuch': write the name of one that `ebbtide"),
    (
        "rtx40",
        "did you mean rtx4060, rtx4060ti-16gb, rtx4070 or rtx4080? `ebbtide machines`",
    ),
    ("h1000-80gb", "there is no machine 'h1000-80gb': did you mean h100-80gb,"),
    ("4095", "did you mean rtx4090"),
    ("h100.json", "machine file h100.json cannot be read: No such file"),
    ("no/where", "machine file no/where cannot be read"),
    ("x" * 300, "there is no machine 'xxx"),
]


def test_find_machine__reports_a_machine_that_does_not_exist() -> None:
    for name, message in MISSING_MACHINES:
        with pytest.raises(MachineError) as error:
            find_machine(name, TraceBuilder().build().meta.machine)
        assert message in str(error.value)


def test_load_machine__reads_a_file_of_version_0_2_0() -> None:
    path = Path(__file__).with_name("machine-0.2.0.json")
    stated = {
        key: value
        for key, value in json.loads(path.read_text()).items()
        if value is not None
    }
    stated["box"]["network_bytes_per_s"] = None  # a key of later versions
    read = load_machine(path).as_json()
    assert {key: read.get(key) for key in stated} == stated
