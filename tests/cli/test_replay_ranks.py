"""`ebbtide replay --ranks-per-host`: rates of a rank on a host that several share."""

import json
from pathlib import Path

import pytest

from ebbtide.cli import run
from tests.interleave.job_files import MACHINE, write_files

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a machine and a workload."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path


def test_replay__ranks_per_host_divide_the_box(folder: Path, capsys: Printed) -> None:
    box = {
        "ranks": 2,
        "cpu_update_params_per_s": 4.6e9,
        "host_memory_bytes_per_s": 168e9,
    }
    (folder / "shared.json").write_text(json.dumps(MACHINE | {"box": box}))
    common = ["replay", "--workload", "w.json", "--policy", "pipelined", "--machine"]

    def update_ms(*arguments: str) -> float:
        assert run([*common, *arguments, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["machine"]["box"]["ranks"] == result["accuracy"]["ranks_per_host"]
        return float(result["results"][0]["update_ms"])

    as_measured = update_ms("shared.json")
    assert update_ms("shared.json", "--ranks-per-host", "2") == as_measured
    # No rate of a rank alone is known, so it counts as no faster.
    assert update_ms("shared.json", "--ranks-per-host", "1") == as_measured
    assert update_ms("shared.json", "--ranks-per-host", "4") == pytest.approx(
        2 * as_measured, rel=0.05
    )

    assert run([*common, "shared.json", "--ranks-per-host", "4"]) == 0
    printed = capsys.readouterr().out
    assert "rates: of one rank while 4 ranks update on its host" in printed
    assert "accuracy: the machine file does not say where its rates are from" in printed


def test_replay__ranks_per_host_need_a_box(folder: Path, capsys: Printed) -> None:
    common = ["replay", "--workload", "w.json", "--machine"]
    (folder / "bad-box.json").write_text(json.dumps(MACHINE | {"box": {"ranks": 0}}))
    for arguments, message in (
        (["m.json", "--ranks-per-host", "2"], "has no box"),
        (["m.json", "--ranks-per-host", "0"], "--ranks-per-host"),
        (["m.json", "--ranks-per-host", "many"], "--ranks-per-host"),
        (["bad-box.json"], "bad-box.json: box: ranks is 0"),
    ):
        assert run([*common, *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert message in printed.err
    assert (
        run([*common, "m.json", "--ranks-per-host", "1", "--policy", "pipelined"]) == 0
    )


def test_replay__a_published_run_uses_its_own_number_of_ranks(capsys: Printed) -> None:
    trace = Path(__file__).parents[2] / "traces" / "a100-ranks2-async.ebb"
    assert (
        run(
            [
                "replay",
                str(trace),
                "--machine",
                "a100-40gb-published",
                "--policy",
                "pipelined",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["box"]["ranks"] == 2
    assert result["machine"]["host_memory_bytes"] == pytest.approx(540e9 / 2, rel=0.01)
    accuracy = result["accuracy"]
    assert (accuracy["basis"], accuracy["runs"], accuracy["fitted_ranks_per_host"]) == (
        "fitted",
        8,
        [4],
    )
    assert 0 < accuracy["largest_error"] < 0.03
    assert "h2d_bytes_per_s" in accuracy["undetermined"]
