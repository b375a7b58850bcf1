"""Ranks that measure together in real processes, some of which fail, die or hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import MachineError
from ebbtide.features.calibrate import ranks as ranks_module
from ebbtide.features.calibrate.ranks import Ranks, join_ranks
from tests.conftest import slow_case


def wait_and_gather(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.wait()
    ranks.gather({"rate": float(ranks.rank)})


def fail(ranks: Ranks) -> None:
    ranks.wait()
    if ranks.rank == 1:
        raise MachineError("the GPU has no room")
    ranks.wait()


def die(ranks: Ranks) -> None:
    ranks.wait()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.wait()


def hang(ranks: Ranks) -> None:
    ranks.wait()
    time.sleep(600)


def _die_at_once(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAtStart:
    """Work that kills its process when it is unpickled there."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return _die_at_once, ()

    def __call__(self, ranks: Ranks) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("count", [2, slow_case(3)])
def test_ranks__wait_for_each_other_and_exchange_their_rates(count: int) -> None:
    with join_ranks(count, wait_and_gather) as ranks:
        for _ in range(3):
            ranks.wait()
        assert ranks.gather({"rate": 0.0}) == [
            {"rate": float(rank)} for rank in range(count)
        ]
        helpers = ranks.helpers
    assert not any(helper.is_alive() for helper in helpers)


@pytest.mark.parametrize("count", [2, slow_case(3)])
@pytest.mark.parametrize(
    ("work", "message"),
    [
        slow_case(fail, "rank 1: the GPU has no room"),
        slow_case(die, "one of {count} ranks was killed"),
    ],
)
def test_ranks__stop_when_a_rank_fails_or_dies(
    work: Callable[[Ranks], object], message: str, count: int
) -> None:
    with join_ranks(count, work) as ranks:
        ranks.wait()
        with pytest.raises(MachineError, match=message.format(count=count)):
            ranks.wait()


@pytest.mark.slow
def test_ranks__stop_when_a_rank_dies_before_it_connects() -> None:
    with (
        pytest.raises(MachineError, match="one of 2 ranks was killed"),
        join_ranks(2, DiesAtStart()),
    ):
        pass


@pytest.mark.slow
def test_ranks__stop_when_a_rank_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Long enough to start a process.
    monkeypatch.setattr(ranks_module, "_TIMEOUT_S", 20.0)
    with join_ranks(2, hang) as ranks:
        ranks.wait()
        with pytest.raises(
            MachineError, match="one of 2 ranks has ended, or did not answer for 20 s"
        ):
            ranks.wait()


def measure_and_fail(helpers: list[BaseProcess]) -> None:
    with join_ranks(2, hang) as ranks:
        ranks.wait()
        helpers.extend(ranks.helpers)
        raise ValueError("no rates")


@pytest.mark.slow
def test_ranks__an_error_of_the_first_rank_ends_all() -> None:
    helpers: list[BaseProcess] = []
    with pytest.raises(ValueError, match="no rates"):
        measure_and_fail(helpers)
    assert [helper.is_alive() for helper in helpers] == [False]


def join_launched(rank: int, port: int, folder: str) -> None:
    """Join as a rank that DeepSpeed's launcher has started, which sets LOCAL_SIZE and
    no LOCAL_WORLD_SIZE."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_SIZE": 2,
        "MASTER_PORT": port,
    }
    os.environ.update(
        {name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1"
    )
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    with join_ranks(None, wait_and_gather) as ranks:
        wait_and_gather(ranks)
        Path(folder, str(rank)).write_text(
            f"{ranks.count} {ranks.local_rank} {ranks.local_count}"
        )


@pytest.mark.slow
def test_ranks__of_the_launcher_of_deepspeed_measure_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is one of the ranks.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=join_launched, args=(1, port, str(tmp_path)))
    other.start()
    join_launched(0, port, str(tmp_path))
    other.join(120)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [
        "2 0 2",
        "2 1 2",
    ]


def test_ranks__a_single_rank_waits_for_nobody() -> None:
    with join_ranks(None, wait_and_gather) as ranks:
        ranks.wait()
        assert ranks.gather({"rate": 1.0}) == [{"rate": 1.0}]
        assert (ranks.count, ranks.local_count, ranks.helpers) == (1, 1, ())
