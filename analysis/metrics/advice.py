"""Settings that a simulation recommends, which rules may advise. The layer above
provides the simulation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Setting:
    """A change of a job's settings, and the iteration with it."""

    # `policy`: arguments of ebbtide's `enable` or `InterleavedAdamW`; `activations`:
    # numbers of layers that keep, recompute or offload theirs; the key of a framework:
    # its own settings of the offload.
    kind: str
    settings: Mapping[str, Any]
    text: str  # What to do, in words.
    iteration_ms: float | None = None  # The simulated iteration; None: not simulated.
    # The iteration of the job as it is, simulated by the same model on the same
    # machine, else the recorded one; it is longer. None: the job is not known to run
    # there.
    present_ms: float | None = None
    # The recorded iteration; None: the job was not recorded there.
    recorded_ms: float | None = None
    # Whether it fits, by the byte counts of the framework that it is for.
    fits: bool = True
    ends_offload: bool = False  # Whether all optimizer state stays on the device.

    @property
    def gain_ms(self) -> float | None:
        """The gain of the simulated iteration over the present one, None if not known.

        Both iterations must be known.
        """
        if self.iteration_ms is None or self.present_ms is None:
            return None
        return self.present_ms - self.iteration_ms

    def as_json(self) -> dict[str, Any]:
        """Return the object that commands print with `--json`."""
        times = {
            "iteration_ms": self.iteration_ms,
            "simulated_ms": self.iteration_ms,
            "present_ms": self.present_ms,
        }
        others = {
            "recorded_ms": self.recorded_ms,
            "gain_ms": self.gain_ms,
            "fits": self.fits,
        }
        return {"kind": self.kind, "settings": dict(self.settings), **times, **others}


class Adviser(Protocol):
    """Recommends settings for the job of a trace.

    All fit into its memory and are faster than what it has.
    """

    @property
    def can_simulate(self) -> bool:
        """Whether the job can be simulated.

        Only then no setting is one that gains nothing.
        """

    def split_setting(self) -> Setting | None:
        """Return the best static split that the framework has by itself.

        It is no offload, or a part of the state on the device for good; None where it
        gains nothing, or is not known.
        """

    def activations_setting(self) -> Setting | None:
        """Return the best choice of activations, with its gain over recomputing all.

        Return None if none gains, fits or is known.
        """
