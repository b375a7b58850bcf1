"""The time that each sample of a link stands for, and which samples are false."""

import numpy as np
import numpy.typing as npt

# A sample covers the time since the one before. After a gap of this many times the
# usual spacing it covers its window.
_MAX_SPACINGS = 5
# Rounding may put a sampled rate this much above the link's peak; a higher rate is a
# false reading.
_ABOVE_PEAK = 1.02


def sample_starts(
    ends: npt.NDArray[np.int64], windows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the start of the time that each sample covers, in ns.

    The samples are of one device and direction.

    A sample covers the time since the one before, even if its window is only a part of
    that time. `ends`: ends of the windows, ascending, at least one."""
    spacing = np.diff(ends, prepend=ends[0] - windows[0])
    gap = spacing > _MAX_SPACINGS * np.median(spacing)
    starts: npt.NDArray[np.int64] = ends - np.where(
        gap, np.minimum(windows, spacing), spacing
    )
    return starts


def valid_rates(
    rates: npt.NDArray[np.float64], peak_bytes_per_s: float | None
) -> npt.NDArray[np.bool_]:
    """Return which rates (bytes/s) a link can have. `peak_bytes_per_s`: peak of the
    link in one direction; None: not known."""
    limited = (
        rates <= peak_bytes_per_s * _ABOVE_PEAK
        if peak_bytes_per_s
        else np.isfinite(rates)
    )
    valid: npt.NDArray[np.bool_] = (rates >= 0) & limited
    return valid
