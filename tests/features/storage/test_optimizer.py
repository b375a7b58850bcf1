"""InterleavedAdamW with state in storage: the bits of the reference, and commits to go
on from after a crash."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.features.storage.engine.direct_file import aligned
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.machines.machine import StoragePath
from tests.features.overlap.test_late_updates import late_optimizer
from tests.interleave.engine.training import MACHINE, Job, ReferenceOptimizer

# All state of the job takes 37 kB; buffers and copies of bf16 parameters take 12 kB and
# more.
SMALL, HALF, ALL = 20e3, 30e3, 100e3


@contextmanager
def storing_optimizer(
    job: Job,
    folders: list[Path],
    policy: str = "pipelined",
    budget: float = SMALL,
    mode: str = "streamed",
    overlap: str = "none",
    **options: Any,
) -> Iterator[InterleavedAdamW]:
    for folder in folders:
        folder.mkdir(exist_ok=True)
    # fp32 gradients and parameters take 2 B more each.
    budget += sum(
        2 * (param.element_size() - 2) * param.numel() for param in job.net.parameters()
    )
    storage = tuple(StoragePath(1e8, 1e8, path=str(folder)) for folder in folders)
    with late_optimizer(
        job,
        policy,
        mode,
        overlap=overlap,
        storage=folders,
        host_memory_budget=budget,
        **{"machine": replace(MACHINE, storage=storage), **options},
    ) as optimizer:
        yield optimizer


@pytest.mark.parametrize("budget", [SMALL, ALL])
def test_plan__has_state_in_storage_only_if_host_memory_is_short(
    tmp_path: Path, budget: float
) -> None:
    job = Job()
    with storing_optimizer(job, [tmp_path], budget=budget) as optimizer:
        for step in range(3):
            job.step(optimizer, step)
        stored = optimizer.plan.stored
        store = optimizer._runner.engine.store
        assert bool(stored) == (budget == SMALL)
        assert store.host_bytes <= budget + 3 * 8192 * len(
            optimizer.plan.storage_buffers
        )
        files = list(tmp_path.iterdir())
        assert len(files) == 1


def test_storage_written_bytes__counts_what_steps_write(tmp_path: Path) -> None:
    job = Job()
    with storing_optimizer(job, [tmp_path]) as optimizer:
        assert optimizer.storage_written_bytes == 0
        written = []
        for step in range(3):
            job.step(optimizer, step)
            optimizer.synchronize()
            written.append(optimizer.storage_written_bytes)
        layout = optimizer._runner.engine.store.subgroups
        per_step = sum(
            aligned(12 * layout[subgroup].params) for subgroup in optimizer.plan.stored
        )
        assert [after - before for before, after in pairwise(written)] == [
            per_step,
            per_step,
        ]
        optimizer.commit()
        # State in host memory is written, too.
        assert optimizer.storage_written_bytes > written[-1]
        before_change = optimizer.storage_written_bytes
        extra = torch.nn.Parameter(torch.zeros(8, dtype=job.net.first.weight.dtype))
        optimizer.add_param_group({"params": [extra]})
        assert optimizer.storage_written_bytes >= before_change


def test_storage__warns_once_of_folders_in_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        caplog.at_level("WARNING", "ebbtide"),
    ):
        folders, job = [tmp_path, Path(name)], Job()
        with storing_optimizer(job, folders) as optimizer:
            job.step(optimizer)
            optimizer.load_state_dict(optimizer.commit())
            job.step(optimizer)
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if f"storage {name} is a tmpfs" in text]) == 1
    assert not [text for text in warnings if str(tmp_path) in text]


def test_storage__warns_of_file_systems_without_direct_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", without_direct(os.open))
    with caplog.at_level("WARNING", "ebbtide"):
        job = Job()
        with storing_optimizer(job, [tmp_path]) as optimizer:
            job.step(optimizer)
    assert "has no O_DIRECT" in caplog.text


def without_direct(opens: Any) -> Any:
    """Return `os.open` of a file system without O_DIRECT."""

    def open_buffered(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(opens(path, flags, *arguments, **options))

    return open_buffered


@pytest.mark.usefixtures("speculating_policy")
@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6])
def test_step__gives_the_bits_of_the_reference_whether_speculation_on_state_in_storage_is_in_vain_or_not(
    tmp_path: Path, max_grad_norm: float
) -> None:
    """It is computed in the buffer; in vain, the old state is read again."""
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters(), max_grad_norm=max_grad_norm)
    with storing_optimizer(
        job, [tmp_path], "speculating", overlap="backward", max_grad_norm=max_grad_norm
    ) as optimizer:
        reloads = 0
        for step in range(8):
            job.net.zero_grad()
            job.loss(step).backward()
            if step == 3:
                states = optimizer._runner.engine.store.states
                reload = states.reload

                def count(subgroup: int, reload: Any = reload) -> None:
                    nonlocal reloads
                    reloads += 1
                    reload(subgroup)

                states.reload = count  # type: ignore[method-assign]
            optimizer.step()
            same.step(expected, step)
        assert optimizer.plan.stored & optimizer.plan.speculated
        assert (reloads > 0) == (max_grad_norm < 1)
        assert job.outcome() == same.outcome()


def test_step__is_completed_if_storage_fails_once(tmp_path: Path) -> None:
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    with storing_optimizer(job, [tmp_path]) as optimizer:
        for step in range(2):
            job.step(optimizer, step)
            same.step(expected, step)
        states = optimizer._runner.engine.store.states
        for name in ("load", "save"):
            move, failing = getattr(states, name), iter([True])

            def fail_once(
                *arguments: Any, move: Any = move, failing: Any = failing
            ) -> None:
                if next(failing, False):
                    raise EngineError("the drive failed")
                move(*arguments)

            setattr(states, name, fail_once)
            with pytest.raises(
                EngineError, match="the drive failed; the step was completed on the CPU"
            ):
                job.step(optimizer, 2)
            same.step(expected, 2)
        job.step(optimizer, 3)
        same.step(expected, 3)
        assert job.outcome() == same.outcome()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "/nowhere"}, "storage /nowhere is not a folder: create it"),
        ({"storage": []}, "storage has no folder"),
        (
            {"storage": None, "host_memory_budget": 1e9},
            "host_memory_budget needs storage=",
        ),
        (
            {"host_memory_budget": 0},
            "host_memory_budget is 0: it must be bytes, above 0",
        ),
    ],
)
def test_optimizer__refuses_options_that_are_not_valid(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        InterleavedAdamW(
            Job().net.parameters(),
            policy="pipelined",
            **{"storage": tmp_path, **options},
        )


def test_step__says_how_much_host_memory_is_needed(tmp_path: Path) -> None:
    job = Job()
    with (
        storing_optimizer(job, [tmp_path], budget=5e3) as optimizer,
        # 4 B for the gradient and the parameter of 3,072 parameters, and a buffer for
        # the state of 500.
        pytest.raises(
            EngineError,
            match=(
                r"needs 17\.86 KiB of host memory besides storage, more than "
                r"host_memory_bu"
            ),
        ),
    ):
        job.step(optimizer)


def test_step__refuses_the_files_of_another_run(tmp_path: Path) -> None:
    job = Job()
    with storing_optimizer(job, [tmp_path]) as optimizer:
        job.step(optimizer)
        optimizer.commit()
    with (
        storing_optimizer(Job(), [tmp_path]) as optimizer,
        pytest.raises(
            EngineError,
            match="has the state of another run: load the checkpoint that names it",
        ),
    ):
        job.step(optimizer)
