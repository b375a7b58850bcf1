"""The setup of the framework that offloads the optimizer of a job.

The framework's feature reads it from meta.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide import seams
from ebbtide.analysis.metrics.state_split import Framework

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace


class FrameworkSetup(Protocol):
    """The setup on the first rank. Values that were not recorded are None or empty."""

    @property
    def key(self) -> str:
        """The key of the section in meta.json."""

    @property
    def name(self) -> str:
        """The name of the framework."""

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The section as it was recorded, without malformed values."""

    @property
    def version(self) -> str | None:
        """The version of the framework."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the user wrote."""

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO."""

    @property
    def policy(self) -> str | None:
        """The policy under which ebbtide's engine ran the updates; None where the
        framework ran them."""

    @property
    def recorded_policy(self) -> str | None:
        """The policy of the recorded job, by ebbtide's engine or the configuration."""

    @property
    def checkpointing(self) -> bool | None:
        """Whether the framework recomputes forwards in the backward."""

    @property
    def offloads(self) -> bool | None:
        """Whether optimizer state is in host memory or on storage; None where the
        configuration does not say."""

    @property
    def ratio(self) -> float | None:
        """The configured share of the parameters that the CPU updates; None where
        nothing is offloaded."""

    @property
    def cpu_share(self) -> float:
        """The share of the parameters whose state is in host memory; 1 where it is not
        known."""

    @property
    def subgroups(self) -> tuple[int, ...]:
        """The parameters of each subgroup, padding included."""

    @property
    def subgroup_params(self) -> int | None:
        """The configured parameters of a subgroup."""

    @property
    def framework(self) -> Framework | None:
        """The framework, if it chose the resident subgroups; None if ebbtide's engine
        did."""

    @property
    def host_buffer_bytes(self) -> int | None:
        """The bytes of host memory for buffers and gradients of state on storage; None
        if its state is not there."""

    def state_on_device(self, params: int, state_bytes: float) -> int | None:
        """Return the bytes of optimizer state on the device.

        Gradients that are kept beside it count, too; None where the configuration does
        not say. `state_bytes`: of a parameter.
        """

    def describe(self) -> str:
        """Return a line for people on the offload, empty if nothing was recorded."""


def framework_setup(trace: Trace) -> FrameworkSetup | None:
    """Return the setup of the framework that offloads the optimizer.

    Return None for other jobs.
    """
    for key, plug in seams.plugs("setups").items():
        if isinstance(section := trace.raw_meta.get(key), dict):
            setup: FrameworkSetup = plug.load()(section)
            return setup
    return None
