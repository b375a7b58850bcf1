"""The present setting of a job on a machine, which advice has to beat: both are
simulated by the same model there."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ebbtide.analysis.metrics.advice import Setting
from ebbtide.interleave.simulation.simulator import Steps
from ebbtide.units import ms_text

# A smaller gain is not worth a change.
MIN_GAIN = 0.02


@dataclass(frozen=True)
class Present:
    """A job as it is on a machine; nothing of it may be known."""

    # Its own policy, simulated; None: not known, or it does not fit there.
    steps: Steps | None = None
    # Its recorded iteration; None: it was not recorded on this machine.
    recorded_s: float | None = None

    @property
    def iteration_s(self) -> float | None:
        """The simulated iteration, else the recorded one; None: neither is known."""
        return self.recorded_s if self.steps is None else self.steps.iteration_s

    def is_slower_than(self, steps: Steps) -> bool:
        """Return whether simulated steps are worth a change: by their rating, in which
        a plan that does not settle is never shorter than the simulated and the recorded
        iteration."""
        least_s = min(
            inf if self.steps is None else self.steps.iteration_s,
            self.recorded_s or inf,
        )
        return steps.rating_s * (1 + MIN_GAIN) <= least_s

    def has(self, policy: str) -> bool:
        """Return whether a policy is the present one, whatever its copies are
        called."""
        return self.steps is not None and _without_copies(
            self.steps.plan.policy
        ) == _without_copies(policy)

    def setting(
        self,
        kind: str,
        settings: Mapping[str, Any],
        text: str,
        steps: Steps,
        *,
        ends_offload: bool = False,
    ) -> Setting | None:
        """Return a setting that fits as advice; None where it gains too little over the
        present one."""
        if not self.is_slower_than(steps):
            return None
        present_ms, recorded_ms = (
            None if seconds is None else seconds * 1e3
            for seconds in (self.iteration_s, self.recorded_s)
        )
        iteration_ms = steps.iteration_s * 1e3
        times = ms_text(iteration_ms)
        if present_ms is not None:
            times = f"{ms_text(present_ms).removesuffix(' ms')} -> {times}"
        if self.steps is not None and recorded_ms is not None:
            times += f"; {ms_text(recorded_ms).removesuffix(' ms')} recorded"
        return Setting(
            kind,
            settings,
            f"{text} (simulated: {times})",
            iteration_ms,
            present_ms,
            recorded_ms,
            ends_offload=ends_offload,
        )


# The job as it is where nothing of it is known.
NOT_KNOWN = Present()


def _without_copies(policy: str) -> str:
    """Return a policy without its default option for copies of gradients, which
    recorded jobs state."""
    return policy.replace(",grads=async", "")
