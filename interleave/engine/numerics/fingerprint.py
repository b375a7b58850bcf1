"""Fingerprints, 128 bits for each 16 KiB, of parameters, which show that somebody has
changed them.

The memory of the tensor is read as unsigned integers of 64 bits, the last one filled up
with zeros, each of a low and a high half. They are split into blocks of 2,048. A block
has two sums, each with keys of its own (`KEYS`):

    sum = ((low + first key) mod 2**32) * ((high + second key) mod 2**32), over all integers of the block, mod 2**64

This is the hash NH of UMAC (Black et al., CRYPTO 1999), twice. The keys are drawn at
random by each process, so no edit is passed over by all of them: whatever is changed in
a block, each sum is the same with a probability of at most 2**-32, and both with
2**-64.
"""

import os

import numpy as np
import numpy.typing as npt
import torch

# Integers of a block.
BLOCK = 2_048
# By sum, and in it by half: the key of each place in a block.
KEYS: npt.NDArray[np.uint32] = np.frombuffer(
    bytearray(os.urandom(16 * BLOCK)), np.uint32
).reshape(2, 2, BLOCK)

Words = npt.NDArray[np.uint64]
_WORD_BYTES = 8


def memory_words(values: npt.NDArray[np.generic]) -> Words:
    """Return the memory of a flat array as integers of 64 bits, filled up with zeros.
    It is a copy unless aligned."""
    memory = values.view(np.uint8)
    if memory.ctypes.data % _WORD_BYTES == 0 and memory.size % _WORD_BYTES == 0:
        return memory.view(np.uint64)
    words = np.zeros(-(-memory.size // _WORD_BYTES), np.uint64)
    words.view(np.uint8)[: memory.size] = memory
    return words


def fingerprint(values: torch.Tensor) -> bytes:
    """Return the fingerprint of a flat CPU tensor of bfloat16, float16 or float32;
    `CpuKernel.fingerprint` is faster."""
    halves = (
        memory_words(values.detach().view(torch.int16).numpy())
        .view(np.uint32)
        .reshape(-1, 2)
    )
    sums = []
    for begin in range(0, len(halves), BLOCK):
        block = halves[begin : begin + BLOCK].T
        for keys in KEYS:
            factors = (block + keys[:, : block.shape[1]]).astype(np.uint64)
            sums.append(factors.prod(axis=0).sum(dtype=np.uint64))
    return np.array(sums, np.uint64).tobytes()
