"""State that is not there: what a state dict or a commit lacks is an error, and the
optimizer stays as it was."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.storage.engine import direct_file
from ebbtide.features.storage.engine.state_file import StateFile
from ebbtide.interleave import InterleavedAdamW, InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.params.state_dict import RECORD
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates
from ebbtide.machines.machine import StoragePath
from tests.conftest import FUZZ
from tests.interleave.engine.test_interrupts import LineFault
from tests.interleave.engine.test_state_dict import assert_equal
from tests.interleave.engine.training import MACHINE

_PathOf = tuple[Any, ...]
# Options of an optimizer by the form of its state.
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"rule": "adamw"},
    "remainder": {"rule": "adamw-remainder"},
    "8-bit": {"rule": "adamw-8bit"},
    "bf16 moments": {"rule": "adamw-bf16"},
    "momentum": {"rule": "sgd", "momentum": 0.9},
    "matrices": {"rule": "muon"},
    "storage": {"rule": "adamw", "host_memory_budget": 1e5},
}


class SavingJob:
    """A model of matrices with an optimizer of two groups, and its training."""

    def __init__(
        self,
        form: str,
        folder: Path,
        seed: int = 0,
        sizes: tuple[int, ...] = (24, 16, 24),
    ) -> None:
        torch.manual_seed(seed)
        self.params = [
            nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16))
            for rows, columns in pairwise(sizes)
        ]
        options = FORMS[form]
        machine = replace(MACHINE, storage=(StoragePath(1e8, 1e8, path=str(folder)),))
        if form == "storage":
            options = {**options, "storage": folder, "machine": machine}
        self.optimizer = InterleavedOptimizer(
            [
                {"params": [param], "lr": 0.01 * (1 + number)}
                for number, param in enumerate(self.params)
            ],
            policy="pipelined",
            subgroup_params=100,
            threads=1,
            loss_scale="dynamic",
            **options,
        )

    def step(self) -> None:
        for number, param in enumerate(self.params):
            param.grad = torch.full_like(
                param, 0.5 + number + len(self.optimizer.state)
            )
        self.optimizer.step()

    def contents(self) -> dict[str, Any]:
        """Return all that a checkpoint has."""
        return copy.deepcopy(self.optimizer.state_dict())


@pytest.fixture(params=FORMS)
def jobs(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[SavingJob, SavingJob]]:
    """Two jobs of the same form, that is one where a file is open."""
    job = SavingJob(request.param, tmp_path)
    other = (
        job
        if request.param == "storage"
        else SavingJob(request.param, tmp_path, seed=1)
    )
    for one in (job, other):
        for _ in range(3):
            one.step()
    yield job, other
    job.optimizer.close()
    other.optimizer.close()


def paths_in(value: Any, before: _PathOf = ()) -> Iterator[_PathOf]:
    """Yield the keys to each value inside of dicts and lists."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*before, key)
        yield from paths_in(inner, (*before, key))


def changed(
    saved: dict[str, Any], path: _PathOf, change: Callable[[Any, Any], object]
) -> dict[str, Any]:
    """Return a copy of a state dict in which a function has changed a container at a
    key."""
    whole = copy.deepcopy(saved)
    container: Any = whole
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    return whole


def remove(container: Any, key: Any) -> None:
    del container[key]


def distort(container: Any, key: Any) -> None:
    """Change the shape or the type of a value."""
    value = container[key]
    if isinstance(value, torch.Tensor) and value.dim():
        container[key] = value[:-1]
    elif isinstance(value, dict | list):
        container[key] = type(value)()
    elif isinstance(value, str):
        container[key] = value + "x"
    else:
        container[key] = "x"


def retype(container: Any, key: Any) -> None:
    """Let a tensor have integers for real numbers, or the reverse."""
    if isinstance(value := container[key], torch.Tensor):
        container[key] = value.int() if value.is_floating_point() else value.float()


@pytest.mark.parametrize("change", [remove, distort, retype])
def test_load_state_dict__has_the_whole_state_or_changes_nothing(
    jobs: tuple[SavingJob, SavingJob], change: Callable[[Any, Any], object]
) -> None:
    job, other = jobs
    saved = job.optimizer.commit() if job is other else job.contents()
    expected = job.contents()
    values = [param.detach().clone() for param in job.params]
    refused = 0
    for path in list(paths_in(saved))[:: 1 if FUZZ > 1 else 4]:
        with torch.no_grad():
            for param, value in zip(other.params, values, strict=True):
                param.copy_(value)
        other.step()
        before = other.contents()
        error = error_of(other, changed(saved, path, change))
        refused += error is not None
        assert "\n" not in str(error)
        assert_equal(other.contents(), before if error else expected)
    # A commit has no tensors.
    assert refused or change is retype


def error_of(job: SavingJob, state_dict: dict[str, Any]) -> EngineError | None:
    """Load a state dict, and return the error for that."""
    try:
        job.optimizer.load_state_dict(state_dict)
    except EngineError as error:
        return error
    return None


def test_load_state_dict__needs_each_state_of_a_partial_dict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of torch may lack parameters that were never updated, which a line says."""
    job = SavingJob("fp32", tmp_path)
    job.step()
    partial = job.contents()
    del partial["state"][1]
    with pytest.raises(EngineError, match="lacks the state of parameter 1"):
        job.optimizer.load_state_dict(partial)
    del partial[RECORD]
    job.optimizer.load_state_dict(partial)
    assert "has no state of 1 of 2 parameters (the first is number 1)" in caplog.text
    job.optimizer.close()


def test_load_state_dict__refuses_a_step_without_moments_of_torch(
    tmp_path: Path,
) -> None:
    model = nn.Linear(4, 4)
    theirs = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    theirs.step()
    optimizer = InterleavedAdamW(model.parameters(), policy="zero-offload")
    for key, message in (("exp_avg", "no exp_avg"), ("step", "step is not a number")):
        state = copy.deepcopy(theirs.state_dict())
        del state["state"][0][key]
        with pytest.raises(EngineError, match=message):
            optimizer.load_state_dict(state)
    optimizer.close()


def test_load_state_dict__of_a_commit_names_the_folder_that_has_the_state(
    tmp_path: Path,
) -> None:
    job = SavingJob("storage", tmp_path)
    job.step()
    commit = job.optimizer.commit()
    job.optimizer.close()
    other = SavingJob("fp32", tmp_path)
    with pytest.raises(
        EngineError, match=f"{tmp_path}, and this optimizer has no storage"
    ):
        other.optimizer.load_state_dict(commit)
    other.optimizer.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = SavingJob("storage", elsewhere)
    other.step()
    before = other.contents()
    with pytest.raises(
        EngineError, match=f"does not have commit 1.*written to {tmp_path}"
    ):
        other.optimizer.load_state_dict(commit)
    assert_equal(other.contents(), before)
    other.step()
    other.optimizer.close()
    assert not list(elsewhere.iterdir())


def test_load_state_dict__of_a_commit_refuses_parameters_of_other_shapes(
    tmp_path: Path,
) -> None:
    """Their state has the same size."""
    job = SavingJob("storage", tmp_path, sizes=(24, 16, 24))
    job.step()
    commit = job.optimizer.commit()
    job.optimizer.close()
    other = SavingJob("storage", tmp_path, sizes=(16, 24, 16))
    with pytest.raises(
        EngineError, match=r"other params .*\(24, 16\) and .*\(16, 24\)"
    ):
        other.optimizer.load_state_dict(commit)
    other.optimizer.close()


def test_load_state_dict__of_a_commit_in_use_leaves_the_optimizer_as_it_was(
    tmp_path: Path,
) -> None:
    job = SavingJob("storage", tmp_path)
    job.step()
    commit = job.optimizer.commit()
    folder = tmp_path / "other"
    folder.mkdir()
    name = commit["storage"]["files"][0]
    (folder / name).hardlink_to(tmp_path / name)
    other = SavingJob("storage", folder)
    with pytest.raises(EngineError, match="in use by another optimizer"):
        other.optimizer.load_state_dict(commit)
    job.optimizer.close()
    other.optimizer.load_state_dict(commit)
    other.optimizer.close()


def test_load_state_dict__that_fails_in_the_middle_ends_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SavingJob("fp32", tmp_path)
    job.step()
    saved, write, written = job.contents(), SubgroupStates.write, []

    def fail_later(states: SubgroupStates, subgroup: int, state: torch.Tensor) -> None:
        written.append(subgroup)
        if len(written) == 3:
            raise OSError("broken drive")
        write(states, subgroup, state)

    monkeypatch.setattr(SubgroupStates, "write", fail_later)
    with pytest.raises(EngineError, match=r"in part only .broken drive. and is lost"):
        job.optimizer.load_state_dict(saved)
    with pytest.raises(EngineError, match="closed, or its state is lost"):
        job.optimizer.state_dict()
    with pytest.raises(EngineError, match="closed, or its state is lost"):
        job.optimizer.load_state_dict(saved)


@contextmanager
def handler(on_signal: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: on_signal())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", ["step", "commit", "load_state_dict", "load commit"])
def test_state_dict__in_a_signal_handler_at_any_line_is_whole(
    tmp_path: Path, call: str
) -> None:
    """It is the state before or after the call, and has no key of a commit."""
    torch.set_num_threads(1)
    form = "storage" if "commit" in call else "fp32"
    job = SavingJob(form, tmp_path)
    for _ in range(2):
        job.step()
    other = job.contents()
    other["state"][0]["exp_avg"] += 1
    commit = job.optimizer.commit() if form == "storage" else {}
    calls: dict[str, Callable[[], object]] = {
        "step": job.step,
        "commit": lambda: job.optimizer.commit(),
        "load_state_dict": lambda: job.optimizer.load_state_dict(other),
        "load commit": lambda: job.optimizer.load_state_dict(commit),
    }
    lines = LineFault(None, lambda: None)
    with lines.armed():
        calls[call]()
    texts: list[dict[str, Any]] = []
    count = 12
    for number in range(count):
        if call == "load_state_dict":
            other["state"][0]["exp_avg"] += 1
        fault = LineFault(
            1 + lines.count * number // count,
            lambda: signal.raise_signal(signal.SIGUSR1),
        )
        texts.clear()
        before = job.contents()
        with handler(lambda: texts.append(job.contents())), fault.armed():
            calls[call]()
        after = job.contents()
        (own,) = texts
        assert "storage" not in own
        assert any(_is_equal(own, whole) for whole in (before, after)), number
    job.optimizer.close()


def _is_equal(one: Any, other: Any) -> bool:
    try:
        assert_equal(one, other)
    except AssertionError:
        return False
    return True


def test_storage__needs_no_more_space_than_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with 1 MB of free space, which is measured, for 0.2 MB of state and one
    more commit of it."""
    import os

    statvfs = os.statvfs(tmp_path)
    values = list(statvfs)
    values[4] = 1_000_000 // statvfs.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    param = nn.Parameter(torch.zeros(16_000))
    optimizer = InterleavedAdamW(
        [param],
        policy="zero-offload",
        machine=MACHINE,
        storage=tmp_path,
        host_memory_budget=3.3e5,
    )
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.commit()
    optimizer.close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 600_000


def test_state_file__says_how_much_space_all_state_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path / "file", [5 << 20] * 4, b"r" * 16)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(direct_file.os, "posix_fallocate", full)
    with pytest.raises(
        EngineError, match=r"needs 20.00 MiB more, and .* GiB are free: free space"
    ):
        file.reserve(range(4))
    file.close()
