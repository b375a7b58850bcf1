"""CudaDevice's own code without a GPU: pinned memory, the budget, captures, and kernels
that do not compile."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ebbtide.interleave.engine.devices import host_memory
from ebbtide.interleave.engine.devices.cuda import MARGIN, CudaDevice
from ebbtide.interleave.engine.devices.device import copy_now
from ebbtide.interleave.engine.errors import EngineError, UpdateNotStarted
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.interleave.engine.devices import fake_cuda
from tests.interleave.engine.devices.fake_cuda import (
    FakeCuda,
    capture_mode,
    current_device,
    install,
    open_fake,
)
from tests.interleave.engine.jobs import ReferenceAdamW
from tests.interleave.engine.states import arguments, bits, plausible_state

GIB = 1 << 30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = install(monkeypatch)
    yield fake
    if fake.registered:
        gc.collect()
    assert not fake.registered


def mapping_flags(pointer: int) -> list[str]:
    """Return the flags of the mapping that has an address, from /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(text, 16) for text in first.split("-"))
            inside = begin <= pointer < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def resident_bytes(pointer: int) -> int:
    """Return the resident bytes of the mapping that has an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(text, 16) for text in first.split("-"))
            if begin <= pointer < end:
                return next(
                    int(other.split()[1]) << 10
                    for other in lines
                    if other.startswith("Rss:")
                )
    return 0


def test_allocate_host__pinned_memory_is_not_in_forked_processes(
    cuda: FakeCuda,
) -> None:
    """Else the next write of the parent would move a page that the GPU uses."""
    memory = open_fake(cuda).allocate_host((3, 5000), torch.float32)
    assert memory.shape == (3, 5000)
    assert not memory.any()
    assert list(cuda.registered) == [memory.data_ptr()]
    assert "dc" in mapping_flags(memory.data_ptr())
    child = os.fork()
    if not child:
        os._exit(7 if mapping_flags(memory.data_ptr()) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_allocate_host__takes_huge_pages_on_all_threads_before_it_pins(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident: list[int] = []
    touched: list[tuple[str, int]] = []
    bind = host_memory.bind_thread

    def register(pointer: int, nbytes: int, flags: int) -> int:
        assert "hg" in mapping_flags(pointer)
        resident.append(resident_bytes(pointer))
        return FakeCuda.cudaHostRegister(cuda, pointer, nbytes, flags)

    def spy(node: int | None) -> None:
        bind(node)
        touched.append((threading.current_thread().name, threading.get_ident()))

    monkeypatch.setattr(cuda, "cudaHostRegister", register)
    monkeypatch.setattr(host_memory, "_CHUNK_BYTES", 4 << 20)
    monkeypatch.setattr(host_memory, "bind_thread", spy)
    monkeypatch.setattr("ebbtide.host_limits.rank_cores", lambda: 3)
    # Not of whole pages.
    memory = open_fake(cuda).allocate_host((24_000_001,), torch.uint8)
    assert resident[0] >= memory.nbytes
    assert len(touched) > 1
    assert not memory.any()


def test_allocate_host__says_how_much_cannot_be_pinned_and_clears_the_error(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    library = type(
        "Runtime", (), {"cudaGetLastError": lambda self: calls.append("cleared")}
    )
    monkeypatch.setattr("ctypes.CDLL", lambda path: library())
    maps = "7f00-7f01 r-xp 00000000 08:01 42   /opt/lib/libcudart.so.12\n"
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    monkeypatch.setattr("ebbtide.host_limits.rank_cores", lambda: 1)
    cuda.register_error = 2
    with pytest.raises(
        EngineError, match=r"800 bytes .* cannot be pinned \(CUDA error 2\)"
    ):
        open_fake(cuda).allocate_host((100,), torch.float64)
    assert calls == ["cleared"]


def test_free_bytes__is_what_the_job_leaves_at_its_highest(cuda: FakeCuda) -> None:
    device = open_fake(cuda)

    def free_gib() -> float | None:
        free_bytes = device.free_bytes()
        return None if free_bytes is None else free_bytes / GIB

    margin = MARGIN * 80
    cuda.reserved_bytes = 30 * GIB
    # Results are rounded down to 64 MiB.
    assert free_gib() == pytest.approx(80 - 1 - 30 - margin, abs=0.07)
    # The optimizer takes 10 GiB; the job's part is as before.
    device._used = 10 * GIB
    device._job_memory.record_own(device._used)
    cuda.reserved_bytes = 40 * GIB
    assert free_gib() == pytest.approx(80 - 1 - 30 - margin, abs=0.07)
    # It releases them: torch keeps them reserved.
    device._used = 0
    assert free_gib() == pytest.approx(80 - 1 - 30 - margin, abs=0.07)
    # The job grows by 5 GiB, then returns everything; the highest counts.
    cuda.reserved_bytes = 45 * GIB
    device.sample_memory()
    cuda.reserved_bytes, cuda.frees = 4 * GIB, 3
    assert free_gib() == pytest.approx(80 - 1 - 35 - margin, abs=0.07)
    # After that, the optimizer's part is what it has allocated since.
    cuda.reserved_bytes = 38 * GIB
    assert free_gib() == pytest.approx(80 - 1 - 38 - margin, abs=0.07)
    # Other processes count as they are now.
    cuda.others_bytes = 6 * GIB
    assert free_gib() == pytest.approx(80 - 6 - 38 - margin, abs=0.07)
    cuda.others_bytes = 60 * GIB
    assert free_gib() == 0


def test_free_bytes__of_memory_that_is_allocated_and_returned_while_the_optimizer_works(
    cuda: FakeCuda,
) -> None:
    """A job that empties torch's cache in every step: the optimizer's memory is not
    taken for the job's."""
    device = open_fake(cuda)
    for step in range(5):
        cuda.frees += 1
        cuda.reserved_bytes = 20 * GIB
        device.sample_memory()
        device._used = 15 * GIB
        device._job_memory.record_own(device._used)
        device._used = 0
        cuda.reserved_bytes = 35 * GIB
        free_bytes = device.free_bytes()
        assert free_bytes is not None
        assert free_bytes / GIB == pytest.approx(80 - 1 - 20 - MARGIN * 80, abs=0.07), (
            step
        )


def test_update__that_cannot_start_says_so(cuda: FakeCuda) -> None:
    device = open_fake(cuda)
    state = plausible_state(50, torch.bfloat16, torch.bfloat16, 0)
    before = [tensor.clone() for tensor in state]
    cuda.compile_error = RuntimeError("Failed to find C compiler")
    with pytest.raises(UpdateNotStarted, match="C compiler"):
        device.update([TensorUpdate(*arguments(state), Hyper().scalars(1))])
    assert all(
        torch.equal(bits(a), bits(b)) for a, b in zip(state, before, strict=True)
    )


def test_warm_up__says_what_the_kernels_need(cuda: FakeCuda) -> None:
    device = open_fake(cuda)
    cuda.compile_error = RuntimeError("Failed to find C compiler\nmore")
    with pytest.raises(EngineError, match=r"Failed to find C compiler\).*gcc") as error:
        device.warm_up({(torch.bfloat16, torch.bfloat16)})
    assert "\n" not in str(error.value)


def test_cuda_device__refuses_gpus_of_amd(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their builds of torch call them `cuda`, and Triton compiles no PTX for them."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with pytest.raises(
        EngineError, match=r"^GPUs of AMD \(ROCm\) are not supported: .*NVIDIA"
    ) as error:
        CudaDevice(torch.device("cuda", 0))
    assert "\n" not in str(error.value)


def test_cuda_device__says_that_triton_is_missing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, fake_cuda.KERNEL)
    monkeypatch.delattr("ebbtide.interleave.engine.numerics.triton_kernel")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EngineError, match=r"need Triton .*: pip install triton$"):
        CudaDevice(torch.device("cuda", 0))


@pytest.fixture
def params() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16())
        for n in (50, 200)
    ]


def set_gradients(params: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def test_step__completes_on_the_cpu_if_the_update_cannot_start(
    cuda: FakeCuda, params: list[torch.Tensor]
) -> None:
    """The state is not lost: nothing was changed."""
    reference = ReferenceAdamW([param.detach().clone() for param in params])
    device = open_fake(cuda)
    optimizer = InterleavedAdamW(
        params, policy="gpu-only", subgroup_params=60, threads=1, device=device
    )
    for step in range(3):
        cuda.compile_error = RuntimeError("no variant") if step == 1 else None
        set_gradients(params, step)
        set_gradients(reference.params, step)
        if step == 1:
            with pytest.raises(
                EngineError, match="no variant; the step was completed on the CPU"
            ):
                optimizer.step()
        else:
            optimizer.step()
        reference.step()
        for param, expected in zip(params, reference.params, strict=True):
            assert torch.equal(bits(param.detach()), bits(expected))
    optimizer.close()


def test_step__is_not_captured(cuda: FakeCuda, params: list[torch.Tensor]) -> None:
    cuda.capturing = True
    with pytest.raises(EngineError, match="before the capture"):
        CudaDevice(torch.device("cuda"))
    cuda.capturing = False
    optimizer = InterleavedAdamW(
        params, policy="gpu-only", threads=1, device=open_fake(cuda)
    )
    set_gradients(params, 0)
    before = [param.detach().clone() for param in params]
    cuda.capturing = True
    with pytest.raises(EngineError, match="CUDA graph"):
        optimizer.step()
    assert all(
        torch.equal(param, old) for param, old in zip(params, before, strict=True)
    )
    cuda.capturing = False
    optimizer.step()
    assert not any(
        torch.equal(param, old) for param, old in zip(params, before, strict=True)
    )
    optimizer.close()


def test_hooks__do_nothing_during_a_capture(
    cuda: FakeCuda, params: list[torch.Tensor]
) -> None:
    optimizer = InterleavedAdamW(
        params,
        policy="zero-offload",
        threads=1,
        device=open_fake(cuda),
        gradients="streamed",
    )

    def backward() -> None:
        for param in params:
            param.grad = None
        sum((param.float() ** 2).sum() for param in params).backward()

    for _ in range(2):
        backward()
        optimizer.step()
    backward()
    assert len(optimizer._runner.engine.update.offloaded) == 2
    optimizer.step()
    cuda.capturing = True
    backward()
    cuda.capturing = False
    assert not optimizer._runner.engine.update.offloaded
    # The gradients are those of the backward, and the step has them.
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert not any(
        torch.equal(param, old) for param, old in zip(params, before, strict=True)
    )
    optimizer.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_threads__use_the_device_and_end_no_capture(
    cuda: FakeCuda, params: list[torch.Tensor], streamed: bool
) -> None:
    """The training thread has another current device, and keeps it, and its capture
    mode."""
    device = open_fake(cuda)
    optimizer = InterleavedAdamW(
        params,
        policy="interleaved:2",
        subgroup_params=40,
        threads=1,
        device=device,
        memory_budget=1e6,
        gradients="streamed" if streamed else "kept",
    )

    def step() -> None:
        for param in params:
            param.grad = None
        sum((param.float() ** 2).sum() for param in params).backward()
        optimizer.step()

    for _ in range(3):
        step()
    saving = threading.Thread(target=optimizer.state_dict, name="saving")
    saving.start()
    saving.join()
    with torch.no_grad():
        params[0].fill_(1.0)
    step()
    optimizer.close()
    assert not cuda.strays | cuda.strict_threads
    assert (capture_mode(), current_device()) == (0, 0)


def test_copy_now__keeps_the_capture_mode_of_the_thread(cuda: FakeCuda) -> None:
    device = open_fake(cuda)
    with pytest.raises(RuntimeError, match="size"):
        copy_now(device, "h2d", [(torch.ones(3), torch.zeros(2))])
    copy_now(device, "h2d", [(torch.ones(3), torch.zeros(3))])
    assert not cuda.strays | cuda.strict_threads
    assert (capture_mode(), current_device()) == (0, 0)


class FakeTime:
    """A clock of the host that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in ("ebbtide.interleave.engine.devices.cuda", fake_cuda.__name__):
            monkeypatch.setattr(
                f"{module}.time", SimpleNamespace(perf_counter=lambda: self.now_s)
            )


def test_begin_iteration__waits_for_nothing_if_all_streams_share_a_queue(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 the event of a clock is behind all that the
    job has issued."""
    clock = FakeTime(monkeypatch)
    device = open_fake(cuda)
    waits: list[str] = []
    cuda.pause = lambda: waits.append("wait")
    cuda.shares_queue = True
    for _ in range(3):
        cuda.order.issue("job")
        device.begin_iteration()
        clock.now_s += 0.5
        assert not waits
        mark = device.record("job")
        clock.now_s += 0.001
        mark.synchronize()
        assert mark.time_s == pytest.approx(clock.now_s - 0.001, abs=1e-9)
        assert waits == ["wait"]
        waits.clear()


@pytest.mark.parametrize("rate", [1.0, 1.00005, 0.99995])
def test_marks__have_times_of_the_host_though_clocks_drift(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """An hour of iterations of a second, with clocks that differ by 0.18 s after it."""
    clock = FakeTime(monkeypatch)
    device = open_fake(cuda)
    cuda.clock_rate = rate
    for _ in range(3600):
        device.begin_iteration()
        clock.now_s += 0.7
        mark = device.record("d2h")
        clock.now_s += 0.00002
        mark.synchronize()
        assert mark.time_s == pytest.approx(clock.now_s, abs=2e-4)
        clock.now_s += 0.3
