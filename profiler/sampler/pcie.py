"""Peak bandwidth of PCIe links."""

# Bytes per second and lane in one direction, by PCIe generation: transfer rate times
# line code (8b/10b up to generation 2, 128b/130b from 3 to 5, 242B/256B flits in 6).
# PCI-SIG base specifications 1.0 to 6.0.
_LANE_BYTES_PER_S = {
    1: 2.5e9 / 8 * 8 / 10,
    2: 5e9 / 8 * 8 / 10,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}


def link_peak_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """Return the peak of a PCIe link in one direction.

    The peak is before headers, in bytes/s; None if it is not known.
    """
    lane = _LANE_BYTES_PER_S.get(generation or 0)
    return lane * width if lane and width else None
