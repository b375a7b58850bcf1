"""Settings that a simulation recommends, which rules may advise. The layer above provides the simulation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

SettingKind = Literal["deepspeed", "policy", "activations"]


@dataclass(frozen=True)
class Setting:
    """A change of a job's settings, and the iteration with it."""

    # `deepspeed`: keys of the section zero_optimization; `policy`: arguments of ebbtide's `enable` or
    # `InterleavedAdamW`; `activations`: numbers of layers that keep, recompute or offload theirs.
    kind: SettingKind
    settings: Mapping[str, Any]
    text: str  # What to do, in words.
    iteration_ms: float | None = None  # The simulated iteration; None: not simulated.
    gain_ms: float | None = None  # How much shorter that is than the recorded iteration; None likewise.

    @property
    def ends_offload(self) -> bool:
        """Whether all optimizer state stays on the device."""
        return self.kind == "deepspeed" and self.settings.get("offload_optimizer", {}).get("device") == "none"


class Adviser(Protocol):
    """Recommends settings for the job of a trace, all of which fit into its memory."""

    def deepspeed_setting(self) -> Setting | None:
        """Return the best setting of what DeepSpeed has by itself; None where the job cannot be simulated."""

    def activations_setting(self) -> Setting | None:
        """Return the best choice of activations, with its gain over recomputing all; None if none fits or is known."""
