from collections.abc import Iterator

import pytest

from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.speculation import speculate
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import POLICIES, PolicySpec, policy
from ebbtide.interleave.policies.overlap import late
from ebbtide.interleave.policies.registry import plan_in_memory
from ebbtide.machines.machine import Machine
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


@pytest.fixture
def speculating_policy() -> Iterator[None]:
    """Register a policy that speculates a number of subgroups, whatever it gains; `speculating` alone does all."""

    @policy("speculating", overlap=("backward", "both"), base=("pipelined", "interleaved:2"))
    def speculating(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
        """Speculate."""
        plan = plan_in_memory(spec.options["base"], workload, machine)
        count = round(spec.number("a number of subgroups", 1e6, 0, 1e6))
        plan = speculate(plan, workload, count, uploads_first=count % 2 == 0)
        return (late(plan, workload) if spec.options["overlap"] == "both" else plan).validate(workload)

    yield
    del POLICIES["speculating"]
