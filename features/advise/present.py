"""The present setting of a job on a machine, which advice has to beat: both are
simulated by the same model there."""

from dataclasses import dataclass

from ebbtide.analysis.metrics.advice import IterationGain
from ebbtide.interleave.simulation.simulator import Steps


@dataclass(frozen=True)
class Present:
    """A job as it is on a machine; nothing of it may be known."""

    # Its own policy, simulated; None: not known, or it does not fit there.
    steps: Steps | None = None
    # Its recorded iteration; None: it was not recorded on this machine.
    recorded_ms: float | None = None

    @property
    def policy(self) -> str | None:
        """Its own policy; None: not known."""
        return None if self.steps is None else self.steps.plan.policy

    @property
    def iteration_ms(self) -> float | None:
        """The simulated iteration, else the recorded one; None: neither is known."""
        return self.recorded_ms if self.steps is None else self.steps.iteration_s * 1e3

    def gain(self, steps: Steps) -> IterationGain:
        """Return the gain of simulated steps."""
        return IterationGain(
            steps.iteration_s * 1e3,
            steps.rating_s * 1e3,
            self.iteration_ms,
            self.recorded_ms,
            self.policy,
        )

    def is_slower_than(self, steps: Steps) -> bool:
        """Return whether simulated steps are worth a change: by their rating, in which
        a plan that does not settle is never shorter than the simulated and the recorded
        iteration."""
        return self.gain(steps).is_enough

    def has(self, policy: str) -> bool:
        """Return whether a policy is the present one, but for its copies."""
        own = self.policy
        return own is not None and _without_copies(own) == _without_copies(policy)


# The job as it is where nothing of it is known.
NOT_KNOWN = Present()


def _without_copies(policy: str) -> str:
    """Return a policy without its default option for copies of gradients, which
    recorded jobs state."""
    return policy.replace(",grads=async", "")
