"""Advice for a job, which a simulation has shown to be better and to fit. The layer
above provides the simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ebbtide.analysis.metrics.device_fit import MemoryNeed
from ebbtide.units import ms_text

# A smaller gain is not worth a change.
MIN_GAIN = 0.02


class AdviceError(ValueError):
    """Advice that does not fit, or is no better than what the job has."""


@dataclass(frozen=True)
class IterationGain:
    """The gain of a simulated iteration over the job as it is.

    Attributes:
        iteration_ms: The simulated iteration.
        rated_ms: The iteration that is compared: longer where a plan does not settle.
        present_ms: The iteration of the job as it is, simulated by the same model on
            the same machine, else the recorded one. None: it is not known to run there.
        recorded_ms: The recorded iteration; None: the job was not recorded there.
        baseline: The policy of the job as it is, simulated; None: not known.
    """

    iteration_ms: float
    rated_ms: float
    present_ms: float | None = None
    recorded_ms: float | None = None
    baseline: str | None = None

    @property
    def is_enough(self) -> bool:
        """Whether the gain over what is known of the job is worth a change."""
        own = filter(None, (self.present_ms, self.recorded_ms))
        return all(self.rated_ms * (1 + MIN_GAIN) <= length for length in own)

    @property
    def ms(self) -> float | None:
        """The gain over the present iteration; None where that is not known."""
        return None if self.present_ms is None else self.present_ms - self.iteration_ms

    @property
    def text(self) -> str:
        """Both iterations in few words."""
        text = ms_text(self.iteration_ms)
        if self.present_ms is not None:
            text = f"{ms_text(self.present_ms).removesuffix(' ms')} -> {text}"
        if self.baseline is not None and self.recorded_ms is not None:
            text += f"; {ms_text(self.recorded_ms).removesuffix(' ms')} recorded"
        return text


@dataclass(frozen=True)
class Advice:
    """A change of a job's settings, with a simulation of it. Advice that does not fit,
    or gains too little, cannot be made: it raises AdviceError.

    Attributes:
        kind: What the settings are of. `policy`: arguments of ebbtide's `enable` or
            `InterleavedAdamW`; `activations`: numbers of layers that keep, recompute or
            offload theirs; the key of a framework: its own settings of the offload.
        change: What to do, in words.
        gain: The iterations before and after.
        memory: What is needed and free, by the byte counts of `framework`; empty where
            nothing moves to another memory.
        framework: The framework whose bytes were counted, with its version.
        lines: The lines to paste, by what they are for: `deepspeed` or `script`.
        placeholders: Keys in the lines whose values are not known.
        notes: What to know besides.
        ends_offload: Whether all optimizer state stays on the device.
    """

    kind: str
    settings: Mapping[str, Any]
    change: str
    gain: IterationGain
    memory: tuple[MemoryNeed, ...] = ()
    framework: str = "torch"
    lines: Mapping[str, str] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ends_offload: bool = False

    def __post_init__(self) -> None:
        for need in self.memory:
            if not need.fits:
                raise AdviceError(f"{self.change}: it does not fit ({need.memory})")
        if not self.gain.is_enough:
            raise AdviceError(f"{self.change}: it gains too little")

    @property
    def iteration_ms(self) -> float:
        """The simulated iteration."""
        return self.gain.iteration_ms

    @property
    def gain_ms(self) -> float | None:
        """The gain over the present iteration; None where that is not known."""
        return self.gain.ms

    @property
    def text(self) -> str:
        """The change, with its notes and both iterations."""
        change = ": ".join((self.change, *self.notes))
        return f"{change} (simulated: {self.gain.text})"

    def as_json(self) -> dict[str, Any]:
        """Return the object that commands print with `--json`."""
        return {
            "kind": self.kind,
            "settings": dict(self.settings),
            "iteration_ms": self.iteration_ms,
            "simulated_ms": self.iteration_ms,
            "present_ms": self.gain.present_ms,
            "recorded_ms": self.gain.recorded_ms,
            "gain_ms": self.gain_ms,
            "fits": True,
        }


class Adviser(Protocol):
    """Advises the job of a trace."""

    @property
    def can_simulate(self) -> bool:
        """Whether the job can be simulated: only then None means that nothing gains."""

    def split_advice(self) -> Advice | None:
        """Return the best static split that the framework has by itself: no offload, or
        a part of the state on the device for good; None where it gains nothing, or is
        not known."""

    def activations_advice(self) -> Advice | None:
        """Return the best choice of activations, with its gain over recomputing all;
        None if none gains, fits or is known."""
