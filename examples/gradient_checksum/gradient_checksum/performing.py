"""The function that the engine calls for each operation, on the thread of its lane."""

from zlib import crc32

import torch

# The last checksum of each subgroup.
CHECKSUMS: dict[int, int] = {}


def checksum(store, op):
    """Compute the checksum of the gradient of a subgroup."""
    gradient = store.host_gradient(op.subgroup)
    CHECKSUMS[op.subgroup] = crc32(gradient.view(torch.uint8).numpy())
