"""Checks of reads: they find every reader that does not wait, and no other one; the bits stay the reference's."""

from __future__ import annotations

import copy
import ctypes
import io
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.test_late_updates import expected_outcome, late_optimizer, random_job
from tests.interleave.engine.training import Job

Read = Callable[[torch.nn.Module], Any]


def _ema(net: torch.nn.Module) -> list[torch.Tensor]:
    averages = [torch.zeros_like(param) for param in net.parameters()]
    torch._foreach_lerp_(averages, list(net.parameters()), 0.1)
    return averages


def _unpickled(param: torch.Tensor) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(param, stream)
    stream.seek(0)
    return torch.load(stream)


# A reader, and the operation that a report names.
READERS: dict[str, tuple[Read, str]] = {
    "data": (lambda net: net.late.weight.data * 1, "aten.mul.Tensor"),
    "detach": (lambda net: net.late.weight.detach().t()[0].sum(), "aten.sum.default"),
    "ema": (_ema, "aten._foreach_lerp_.Scalar"),
    "foreach": (lambda net: torch._foreach_norm(list(net.parameters())), "aten._foreach_norm.Scalar"),
    "forward": (lambda net: net.late.forward(torch.ones(1, 24)), "aten.addmm.default"),
    "other module": (lambda net: torch.ones(1, 24) @ net.late.weight, "aten.mm.default"),
    "vector": (lambda net: torch.nn.utils.parameters_to_vector(net.parameters()), "aten.cat.default"),
    "item": (lambda net: net.late.bias[3].item(), "aten._local_scalar_dense.default"),
    "conversion": (lambda net: net.late.weight.double(), "aten._to_copy.default"),
    "deepcopy": (lambda net: copy.deepcopy(net.late.weight), "aten.clone.default"),
    "save": (lambda net: _unpickled(net.late.weight), "Tensor.untyped_storage"),
    "pickle": (lambda net: pickle.loads(pickle.dumps(net.late.weight)), "Tensor.untyped_storage"),
    "numpy": (lambda net: torch.tensor(net.late.weight.detach().numpy()), "Tensor.numpy"),
    "list": (lambda net: net.late.weight.tolist(), "Tensor.tolist"),
}


def _from_thread(net: torch.nn.Module) -> Any:
    values: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: values.append(net.late.weight.detach().clone()))
    thread.start()
    thread.join()
    return values[0]


def _from_memory(net: torch.nn.Module) -> Any:
    param = net.late.weight
    return torch.tensor(list((ctypes.c_float * param.numel()).from_address(param.data_ptr())))


def _leaves(value: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(value)]


def test_check_reads__finds_every_reader_and_gives_it_the_right_values(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(torch.float32)
    with late_optimizer(job, "pipelined", "kept") as optimizer, caplog.at_level(logging.WARNING, "ebbtide"):
        for name, (read, operator) in READERS.items():
            caplog.clear()
            with optimizer.check_reads() as accesses:
                job.step(optimizer)
                values = _leaves(read(job.net))
            assert [access.operator for access in accesses] == [operator], name
            assert all(map(torch.equal, values, _leaves(read(job.net)))), name
            assert {"late.weight", "late.bias"} & set(accesses[0].params), name
            assert accesses[0].location.startswith(f"{__file__}:"), name
            assert [record.getMessage() for record in caplog.records] == [f"ebbtide: {accesses[0]}"], name


def test_check_reads__reports_one_line_that_says_what_to_do() -> None:
    job = Job()
    with late_optimizer(job, "pipelined", "kept") as optimizer, optimizer.check_reads() as accesses:
        job.step(optimizer)
        line = _ema.__code__.co_firstlineno + 2
        _ema(job.net)
        assert str(accesses[0]) == (
            f"{__file__}:{line}: aten._foreach_lerp_.Scalar reads parameter first.weight and 8 more before its update "
            "is known to have ended: call optimizer.synchronize() first, or use the parameter in the forward of the "
            "module of `model` that has it"
        )


def test_check_reads__finds_all_readers_of_a_parameter() -> None:
    job = Job()
    with late_optimizer(job, "pipelined", "kept") as optimizer, optimizer.check_reads() as accesses:
        for _ in range(2):
            job.step(optimizer)
            job.net.late.weight.sum()
            job.net.late.weight.sum()
    lines = [int(access.location.rsplit(":", 1)[1]) for access in accesses]
    assert lines == [lines[0], lines[0] + 1]


@pytest.mark.parametrize("read", [_from_thread, _from_memory])
def test_check_reads__gives_nan_to_readers_that_torch_does_not_show(read: Read) -> None:
    job = Job(torch.float32)
    with late_optimizer(job, "pipelined", "kept") as optimizer:
        with optimizer.check_reads() as accesses:
            job.step(optimizer)
            assert read(job.net).isnan().all()
            optimizer.synchronize()
            assert not read(job.net).isnan().any()
        assert accesses == []


def test_check_reads__finds_writes() -> None:
    job, same = Job(torch.float32), Job(torch.float32)
    with late_optimizer(job, "pipelined", "kept") as optimizer:
        with optimizer.check_reads() as accesses, torch.no_grad():
            with torch.enable_grad():
                job.step(optimizer)
            job.net.late.weight.data.clamp_(-0.01, 0.01)
            torch.nn.init.zeros_(job.net.late.bias)
            ctypes.memset(job.net.norm.bias.data_ptr(), 0, 4)
        writes = [(access.operator, access.params) for access in accesses if access.is_write]
        assert writes == [
            ("aten.clamp_.default", ["late.weight"]),
            ("aten.zero_.default", ["late.bias"]),
            ("an operation outside of torch or this thread", ["norm.bias"]),
        ]
        job.step(optimizer)
        optimizer.synchronize()
    # Those of operations are not lost.
    with late_optimizer(same, "pipelined", "kept", overlap="none", model=None) as optimizer:
        same.step(optimizer)
        with torch.no_grad():
            same.net.late.weight.clamp_(-0.01, 0.01)
            same.net.late.bias.zero_()
        same.step(optimizer)
    assert job.outcome() == same.outcome()


@contextmanager
def _checked(accesses: list[Any], job: Job, policy: str, mode: str, **options: Any) -> Iterator[InterleavedAdamW]:
    with late_optimizer(job, policy, mode, **options) as optimizer, optimizer.check_reads() as own_accesses:
        yield optimizer
        accesses += own_accesses


@pytest.mark.parametrize(("policy", "mode"), [("pipelined", "kept"), ("interleaved:2", "streamed")])
@pytest.mark.parametrize("seed", range(2))
def test_check_reads__reports_nothing_in_random_jobs_and_keeps_their_bits(policy: str, mode: str, seed: int) -> None:
    accesses: list[Any] = []
    checked = random_job(seed, mode, lambda job, **options: _checked(accesses, job, policy, mode, **options))
    assert checked == expected_outcome(seed, mode)
    assert accesses == []


def test_check_reads__sees_reads_in_compiled_functions() -> None:
    job = Job(torch.float32)
    norm = torch.compile(lambda net: net.late.weight.norm(), backend="eager")
    with late_optimizer(job, "pipelined", "kept") as optimizer:
        job.step(optimizer)
        optimizer.synchronize()
        norm(job.net)
        with optimizer.check_reads() as accesses:
            job.step(optimizer)
            norm(job.net)
        assert [access.params for access in accesses] == [["late.weight"]]


def test_check_reads__shows_parameters_again_after_an_error() -> None:
    job = Job()
    with late_optimizer(job, "pipelined", "kept") as optimizer:

        def fail() -> None:
            with optimizer.check_reads():
                job.step(optimizer)
                raise RuntimeError("of the job")

        with pytest.raises(RuntimeError, match="of the job"):
            fail()
        assert not any(param.isnan().any() for param in job.net.parameters())


def test_check_reads__needs_a_module_that_waits() -> None:
    job = Job()
    with (
        late_optimizer(job, "pipelined", "kept", overlap="none", model=None) as optimizer,
        pytest.raises(EngineError, match="needs a module that waits for updates: pass model="),
        optimizer.check_reads(),
    ):
        pass
