"""Commands on a trace of several ranks of which some differ: summary, iterations,
findings, plot, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import run
from tests.analysis.metrics.ranks.fleets import GIB, fleet, write_fleet


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "fleet.ebb"
    peculiar = {2: {"link": 0.5}, 3: {"bytes": 4 * GIB}, 8: {"backward": 1.3}}
    write_fleet(fleet(9, 6, peculiar, noise=0.002, ranks_per_host=3), path)
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert run([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_summary__lists_ranks_that_differ(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = json.loads(printed(capsys, "summary", path, "--json"))["rank_differences"]
    causes = {(entry["ranks"][0], entry["host"]): entry["cause"] for entry in listed}
    assert causes == {
        (2, "node0"): "slow link",
        (3, "node1"): "less free memory",
        (8, "node2"): "slow backward",
    }
    text = printed(capsys, "summary", path)
    assert "3 of 9 ranks differ from the others." in text
    assert "backward 519.8 ms, usual 399.9 ms (+30 %)" in text
    assert (
        json.loads(printed(capsys, "summary", path, "--rank", 2, "--json"))[
            "rank_differences"
        ]
        is None
    )


def test_iterations__by_rank_has_a_row_per_rank(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads(printed(capsys, "summary", path, "--by", "rank", "--json"))
    rows = {row["rank"]: row for row in result["ranks"]}
    assert [rows[rank]["cause"] for rank in (1, 2, 3, 8)] == [
        None,
        "slow link",
        "less free memory",
        "slow backward",
    ]
    assert rows[8]["backward_ms"] == pytest.approx(520, rel=0.01)
    assert rows[8]["times_slowest"] == 6
    lines = printed(capsys, "summary", path, "--by", "rank").splitlines()
    ranks = [line.split()[0] for line in lines if line.strip()[:1].isdigit()]
    assert ranks[0] == "8"
    assert set(ranks[:3]) == {"2", "3", "8"}


def test_findings__names_ranks_and_causes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = json.loads(printed(capsys, "findings", path, "--json"))["findings"]
    (difference,) = [finding for finding in findings if finding["rule"] == "slow-rank"]
    assert difference["title"] == "3 ranks differ from the others"
    assert difference["worth_ms"] == pytest.approx(120, rel=0.03)
    evidence = " ".join(difference["evidence"])
    assert "rank 2 on node0: slow link: h2d rate" in evidence
    assert "rank 3 on node1: less free memory" in evidence


@pytest.mark.parametrize(
    "arguments",
    [
        "summary {} --jobs 0",
        "findings {} --jobs 2 --scheduler tcp://x:1",
        "summary {} --by rank --rank 1",
    ],
)
def test_commands__refuse_options_that_do_not_fit(arguments: str, path: Path) -> None:
    assert run(arguments.format(path).split()) == 2


@pytest.mark.slow
def test_summary__of_several_processes_is_the_same(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "summary", path, "--json", "--jobs", 2) == printed(
        capsys, "summary", path, "--json"
    )
