"""The split of the optimizer state between device and host.

A policy or the framework of a job makes it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide import seams
from ebbtide.state_bytes import MASTER_BYTES


class Framework(NamedTuple):
    """A framework that splits the optimizer state by itself, by its key in meta.json; a
    version that is not known is empty."""

    key: str
    version: str


class StateSplit:
    """The split between whole subgroups by the policy `twin-flow`, and the base of
    frameworks' splits."""

    def resident(self, ratio: float, subgroups: int) -> range:
        """Return the numbers of the subgroups whose state stays on the device. `ratio`:
        share of the parameters to update on the CPU. The first ones stay, in a number
        that is rounded down; the product is floating point: (1 - 0.9) * 10 is just less
        than 1, so none stays."""
        return range(int((1 - ratio) * subgroups))

    def gradient_bytes(
        self, resident: Sequence[int], grad_bytes: float, offloads: bool
    ) -> float:
        """Return the bytes of gradients that the device always has beside resident
        state.

        `resident`: parameters of each resident subgroup; `grad_bytes`: bytes of a
        parameter's gradient; `offloads`: whether other state is in host memory, which
        makes gradients fp32."""
        return (MASTER_BYTES if offloads else grad_bytes) * float(sum(resident))


def split_of(framework: Framework | None) -> StateSplit:
    """Return the split of a framework.

    Without one, or without its feature, return the split of the policies.
    """
    if framework is None or (plug := seams.plugs("splits").get(framework.key)) is None:
        return StateSplit()
    split: StateSplit = plug.load()(framework.version)
    return split
