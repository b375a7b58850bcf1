"""`ebbtide compare`, on an emulated device: what it prints, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.cli import run
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide, torch_on_one_thread

Printed = pytest.CaptureFixture[str]
# A machine nobody measured, so that these runs need not.
MACHINE = {"host_memory_bytes_per_s": 1e10, "cpu_update_params_per_s": 5e8, "cpu_cast_params_per_s": 1e9}
TINY = "--params 2e5 --iterations 3 --emulate-link 500MB --machine m.json"
PHASES = ("iteration", "forward", "backward", "update")


one_thread = pytest.fixture(scope="module", autouse=True)(torch_on_one_thread)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a machine, and outputs that exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(MACHINE))
    (tmp_path / "slow.json").write_text(json.dumps({**MACHINE, "cpu_update_params_per_s": None}))
    (tmp_path / "taken.png").write_text("kept")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("kept")
    return tmp_path


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose arithmetic is a little off."""
    update: Callable[..., None] = EmulatedDevice.update

    def wrong(self: Any, grad: Any, master: torch.Tensor, *rest: Any) -> None:
        update(self, grad, master, *rest)
        master.mul_(1 + 2**-7)

    monkeypatch.setattr(EmulatedDevice, "update", wrong)


def test_one_object_and_outputs_that_stand(place: Path) -> None:
    asked = [*TINY.split(), "--policy", "pipelined", "--policy", "interleaved:2", "--against", "torch"]
    done = ebbtide("compare", *asked, "--plot", "new.png", "--save", "new", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "ebbtide: new.png\nebbtide: new\n"
    found = json.loads(done.stdout)
    assert found["device"]["emulated"] is True
    assert (found["iterations"], found["warmup_iterations"]) == (3, 2)
    assert [result["policy"] for result in found["results"]] == ["pipelined", "interleaved:2"]
    for result in found["results"]:
        for phase in PHASES:
            pair = result[f"{phase}_ms"]
            assert pair["ratio"] == pytest.approx(pair["measured"] / pair["predicted"])
        assert set(result["busy"]) == {"cpu", "gpu", "h2d", "d2h"}
        assert result["losses"] == found["results"][0]["losses"]
        assert result["losses_equal"] is found["losses_equal"] is True
    assert [peer["name"] for peer in found["peers"]] == ["torch"]
    assert (place / "new.png").read_bytes().startswith(b"\x89PNG")
    names = [f"{name}.{half}.ebb" for name in ("interleaved_2", "pipelined") for half in ("measured", "predicted")]
    assert sorted(path.name for path in (place / "new").iterdir()) == names
    assert len(open_trace(place / "new" / "pipelined.measured.ebb").ops(rank=0)) > 10


def test_tables_say_that_the_device_is_emulated_and_the_losses_equal(place: Path, capsys: Printed) -> None:
    asked = f"{TINY} --policy pipelined --policy zero-offload --against torchao"
    assert run(["compare", *asked.split(), "--plot", "taken.png", "--force"]) == 0
    told = capsys.readouterr().out
    assert "The device is EMULATED" in told
    assert "Measured and predicted: EMULATED device, tells nothing about a GPU" in " ".join(told.split())
    assert "losses: equal bit for bit in all 3 iterations of all 2 policies" in told
    assert "left out: torchao (" in told
    rows = [line.split() for line in told.splitlines()]
    for policy in ("pipelined", "zero-offload"):
        first = next(number for number, row in enumerate(rows) if row[:1] == [policy])
        assert (rows[first][1], *(row[0] for row in rows[first + 1 : first + 4])) == PHASES
    assert (place / "taken.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_losses_that_differ_end_with_1(place: Path, capsys: Printed, json_: list[str]) -> None:
    asked = f"{TINY} --iterations 5 --policy pipelined --policy interleaved:2 --plot new.svg"
    assert run(["compare", *asked.split(), *json_]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("ebbtide: the losses of interleaved:2 are not those of pipelined")
    assert (place / "new.svg").exists()
    if json_:
        assert json.loads(out)["losses_equal"] is False
    else:
        assert "DIFFER" in out
        assert "losses: equal" not in out


# (the command line, what its one line must hold)
BAD = [
    ("--params many", "'many' is not a count"),
    ("--params 10", "the model has from 100000 to 1e+11 parameters"),
    ("--iterations 2", "--iterations is at least 3"),
    ("--policy magic", "there is no policy 'magic'"),
    ("--policy twin-flow", "lacks the share"),
    ("--against magic", "there are torch, deepspeed, torchao"),
    ("--emulate-link fast", "'fast' is not a size"),
    ("--subgroup-params 0", "at least 1"),
    ("--memory-budget none", "'none' is not a size"),
    ("--policy gpu-only --memory-budget 1KB", "policy gpu-only cannot run here"),
    ("--machine nosuch", "there is no machine 'nosuch'"),
    ("--machine slow.json", "no cpu_update_params_per_s"),
    ("--plot taken.png", "taken.png exists already"),
    ("--save taken", "taken exists already"),
    ("--save taken --force", "taken is not a folder of traces"),
    ("--plot new.gif", "must end in .png, .svg, .pdf"),
    ("--plot new.png --save ./new.png", "cannot be both"),
    ("--plot no/new.png", "cannot write no/new.png"),
]


@pytest.mark.parametrize(("line", "says"), BAD)
def test_bad_input_is_one_line_and_leaves_no_trace(place: Path, capsys: Printed, line: str, says: str) -> None:
    before = sorted(place.rglob("*"))
    assert run(["compare", *TINY.split(), *line.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ebbtide: ")
    assert len(err.splitlines()) == 1
    assert says in err
    assert sorted(place.rglob("*")) == before
    assert (place / "taken.png").read_text() == "kept"
