"""`ebbtide compare`, on an emulated device: what it prints, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import run
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.policies import POLICIES
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import open_trace
from tests.cli.test_replay import OWN
from tests.conftest import (
    ebbtide_in_process,
    needs_all_features,
    slow_case,
    torch_on_one_thread,
)

Printed = pytest.CaptureFixture[str]
# Invented rates, so that these runs need not measure.
MACHINE = {
    "host_memory_bytes_per_s": 1e10,
    "cpu_update_params_per_s": 5e8,
    "cpu_cast_params_per_s": 1e9,
}
TINY = "--params 2e5 --steps 3 --emulate-link 500MB --machine m.json"
TIMES = ("iteration", *PHASES)


one_thread = pytest.fixture(scope="module", autouse=True)(torch_on_one_thread)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a machine file, and outputs that exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(MACHINE))
    (tmp_path / "slow.json").write_text(
        json.dumps({**MACHINE, "cpu_update_params_per_s": None})
    )
    (tmp_path / "taken.png").write_text("kept")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("kept")
    return tmp_path


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the emulated device compute slightly wrong results."""
    update: Callable[..., None] = EmulatedDevice.run_updates

    def wrong_updates(self: Any, updates: Sequence[TensorUpdate]) -> None:
        update(self, updates)
        for changed in updates:
            changed.state[0].mul_(1 + 2**-7)

    monkeypatch.setattr(EmulatedDevice, "run_updates", wrong_updates)


def test_compare__prints_one_object_and_writes_its_outputs(folder: Path) -> None:
    arguments = [
        *TINY.split(),
        "--policy",
        "pipelined",
        "--policy",
        "interleaved:2",
        "--against",
        "torch",
    ]
    done = ebbtide_in_process(
        "compare",
        *arguments,
        "--plot",
        "new.png",
        "--save",
        "new",
        "--json",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "ebbtide: new.png\nebbtide: new\n"
    printed = json.loads(done.stdout)
    assert printed["device"]["emulated"] is True
    assert (printed["iterations"], printed["warmup_iterations"]) == (3, 2)
    assert [result["policy"] for result in printed["results"]] == [
        "pipelined",
        "interleaved:2",
    ]
    for result in printed["results"]:
        for phase in TIMES:
            pair = result[f"{phase}_ms"]
            assert pair["ratio"] == pytest.approx(pair["measured"] / pair["predicted"])
        assert set(result["busy"]) == {"cpu", "gpu", "h2d", "d2h"}
        assert result["losses"] == printed["results"][0]["losses"]
        assert result["losses_equal"] is printed["losses_equal"] is True
    assert [peer["name"] for peer in printed["peers"]] == ["torch"]
    assert (folder / "new.png").read_bytes().startswith(b"\x89PNG")
    names = [
        f"{name}.{half}.ebb"
        for name in ("interleaved_2", "pipelined")
        for half in ("measured", "predicted")
    ]
    assert sorted(path.name for path in (folder / "new").iterdir()) == names
    assert len(open_trace(folder / "new" / "pipelined.measured.ebb").ops(rank=0)) > 10


@needs_all_features
def test_compare__tables_say_that_the_device_is_emulated_and_losses_are_equal(
    folder: Path, capsys: Printed
) -> None:
    arguments = f"{TINY} --policy pipelined --policy zero-offload --against torchao"
    assert run(["compare", *arguments.split(), "--plot", "taken.png", "--force"]) == 0
    out = capsys.readouterr().out
    assert "The device is EMULATED" in out
    assert "Measured and predicted: EMULATED device, not a GPU" in " ".join(out.split())
    assert "losses: equal bit for bit in all 3 iterations of all 2 policies" in out
    assert "left out: torchao (" in out
    assert len(out.splitlines()) <= 24
    rows = [row.split() for row in out.splitlines()]
    for policy in ("pipelined", "zero-offload"):
        (row,) = [row for row in rows if row[:1] == [policy]]
        assert (len(row), row[-1]) == (8, "equal")
    assert out.splitlines()[-1].startswith("next: ebbtide replay RUN.ebb --recommend")
    assert (folder / "taken.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("options", [slow_case(["--plot", "new.svg"]), ["--json"]])
def test_compare__exits_with_1_if_losses_differ(
    folder: Path, capsys: Printed, options: list[str]
) -> None:
    arguments = f"{TINY} --policy pipelined --policy interleaved:2"
    assert run(["compare", *arguments.split(), *options]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith(
        "ebbtide: the losses of interleaved:2 differ from those of pipelined"
    )
    assert (folder / "new.svg").exists() == ("--plot" in options)
    if "--json" in options:
        assert json.loads(out)["losses_equal"] is False
    else:
        assert "DIFFER" in out
        assert "losses: equal" not in out


def test_compare__runs_policies_of_a_file(folder: Path, capsys: Printed) -> None:
    (folder / "own.py").write_text(OWN)
    try:
        status = run(
            [
                "compare",
                *TINY.split(),
                "--policy-file",
                "own.py",
                "--policy",
                "own,half=last",
                "--json",
            ]
        )
    finally:
        POLICIES.pop("own", None)
    printed = json.loads(capsys.readouterr().out)
    assert (status, [result["policy"] for result in printed["results"]]) == (
        0,
        ["own,half=last"],
    )


# (options, part of the error message)
BAD = [
    (
        "--policy-file nowhere.py",
        "nowhere.py is not a Python file that registers policies",
    ),
    ("--params many", "'many' is not a count"),
    ("--params 10", "--params 10: must be from 100000 to 1e+11"),
    ("--iterations 2", "--steps must be at least 3"),
    ("--policy magic", "there is no policy 'magic'"),
    ("--policy twin-flow", "lacks the share"),
    ("--against magic", "choose from torch"),
    ("--emulate-link fast", "'fast' is not a size"),
    ("--subgroup-params 0", "at least 1"),
    ("--memory-budget none", "'none' is not a size"),
    ("--policy gpu-only --memory-budget 1KB", "policy gpu-only cannot run here"),
    ("--storage nosuch", "storage nosuch is not a folder"),
    ("--host-free-bytes 1GB", "add --storage FOLDER"),
    ("--storage taken --host-free-bytes 1KB --policy pipelined", "host memory"),
    ("--machine nosuch", "there is no machine 'nosuch'"),
    ("--machine slow.json", "no cpu_update_params_per_s"),
    ("--plot taken.png", "taken.png exists already"),
    ("--save taken", "taken exists already"),
    ("--save taken --force", "taken is not a folder of traces"),
    ("--plot new.gif", "must end in .png, .svg, .pdf"),
    ("--plot new.png --save ./new.png", "cannot be both"),
    ("--plot taken.png/new.png", "cannot write taken.png/new.png"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_compare__bad_input_is_one_line_and_changes_no_file(
    folder: Path, capsys: Printed, options: str, message: str
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(["compare", *TINY.split(), *options.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ebbtide: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert sorted(folder.rglob("*")) == before
    assert (folder / "taken.png").read_text() == "kept"
