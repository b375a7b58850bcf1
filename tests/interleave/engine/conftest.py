from collections.abc import Iterator

import pytest
import torch

from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from tests.conftest import torch_on_one_thread
from tests.interleave.engine.compile_once import compile_once
from tests.interleave.quick_plans import plan_quickly

one_thread = pytest.fixture(scope="session", autouse=True)(torch_on_one_thread)
quick_plans = pytest.fixture(autouse=True)(plan_quickly)
compile_once()


@pytest.fixture(scope="module")
def kernel() -> Iterator[CpuKernel]:
    """Return a kernel of two threads."""
    kernel = CpuKernel(2)
    yield kernel
    kernel.close()


@pytest.fixture(autouse=True)
def own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put torch's `linear` back, which DeepSpeed's stage 3 replaces in a process,
    whatever ran in it before."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


@pytest.fixture
def speculating_policy() -> Iterator[None]:
    # It needs a feature, which tests of the core run without.
    from tests.interleave.engine.speculating import speculating

    with speculating():
        yield
