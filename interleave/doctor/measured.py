"""Checks by measurement: copies over the link, host memory, updates on the CPU."""

from collections.abc import Iterator

from ebbtide.interleave.doctor.check import CheckResult
from ebbtide.interleave.doctor.host import JobHost
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import count_text, rate_text

_SECONDS = 4.0
# Pinned copies reach 80 to 90 % of a link's peak on hosts without a fault.
_MIN_LINK_SHARE = 0.6


def measured_checks(host: JobHost) -> Iterator[CheckResult]:
    """Measure for a few seconds, on the first GPU if there is one; other processes that use the host slow it down."""
    from ebbtide.interleave.calibrate.run import measure_quickly  # imports torch

    rates = measure_quickly(_SECONDS)
    memory, update = rates.get("host_memory_bytes_per_s"), rates.get("cpu_update_params_per_s")
    if memory and update:
        text = (
            f"memory moves {rate_text(memory)}; AdamW updates {count_text(update)} parameters/s ({STATE_BYTES} B each)"
        )
        yield CheckResult("measured-update", "ok", text)
    peak = host.cards[0].device["link"]["peak_bytes_per_s"] if host.cards else None
    for direction in ("h2d", "d2h"):
        pinned, pageable = (rates.get(f"{direction}{kind}_bytes_per_s") for kind in ("", "_pageable"))
        if pinned is None:
            continue
        text = f"{direction}: pinned copies run at {rate_text(pinned)}"
        if pageable:
            text += f", pageable ones at {rate_text(pageable)} ({pinned / pageable:.1f} times slower)"
        if peak and pinned < _MIN_LINK_SHARE * peak:
            text += f": {100 * pinned / peak:.0f} % of the link's {rate_text(peak)}"
            remedy = "see the checks link and numa; other jobs may use the link; IOMMU may be on (iommu=pt)"
            yield CheckResult("measured-copies", "warning", text, remedy)
        else:
            yield CheckResult("measured-copies", "ok", text)
