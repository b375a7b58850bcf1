"""Tasks that wait for nothing."""

import numpy as np

from ebbtide.interleave.simulation.fluid import Tasks
from ebbtide.interleave.simulation.lanes import Lanes


def independent_tasks(
    lanes: Lanes, names: list[str], alone_s: list[float], demand: list[float]
) -> Tasks:
    """Return tasks on the lanes of these names, in the order of the lanes."""
    lane = np.array([lanes.index[name] for name in names])
    none = np.array([], int)
    return Tasks(
        lane, np.array(alone_s), np.array(demand), np.zeros(len(names), int), none, none
    )
