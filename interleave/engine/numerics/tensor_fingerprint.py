"""Fingerprints of 128 bits of the bits of tensors on any device, without waiting for
the device.

The elements of a tensor, in the order of its memory, are read as words of 64 bits, with
zeros behind the last one, in blocks of 1,024 words. For each block there are two sums
modulo 2**64: of the words, and (NH, from UMAC, RFC 4418) of

    ((low + low_key) mod 2**32) * ((high + high_key) mod 2**32)

over the halves of the words, with keys by place. A fingerprint is, for each of the two,
the sum over the blocks of (sum xor (sum >> 32)) * weight(block), modulo 2**64, with
weight(i) = (2 i + 1) * 0x9E3779B97F4A7C15. The change of one word always shows, in the
sum of the words. The sums of products of two different blocks are equal with a
probability of at most 2**-32 over the keys, whatever the difference is. This is no
cryptographic hash: the keys are constant.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide.interleave.engine.forks import WorkQueue

BLOCK = 1024
FACTOR = 0x9E3779B97F4A7C15
_FACTOR = np.uint64(FACTOR)
_MASK = 0xFFFFFFFF
# Words of the parts that are computed at once: on other devices they need temporary
# memory.
_PART_WORDS = 2**19


def fingerprint_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the fingerprint of a tensor's bits as two int64 on its device.

    Return None where it is no array of bits.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        # Newer versions of torch name the mesh of a DTensor, too.
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        return _together([fingerprint_tensor(part) for part in tensors])
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    words = _words(_dense(tensor.detach()))
    return _of_host(words) if tensor.device.type == "cpu" else of_words(words)


def _together(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    readable = [part for part in parts if part is not None]
    if not readable or len(readable) < len(parts):
        return None
    return of_words(torch.cat(readable))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same elements in the order of memory.

    Memory without gaps is not copied.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, min(1, tensor.size(dimension)))
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as int64.

    The last one is filled up with zeros.
    """
    begin, nbytes = (
        tensor.storage_offset() * tensor.element_size(),
        tensor.numel() * tensor.element_size(),
    )
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), begin, (nbytes,), (1,))
    if nbytes % 8:
        return torch.nn.functional.pad(flat, (0, -nbytes % 8)).view(torch.int64)
    return (flat.clone() if begin % 8 else flat).view(torch.int64)


def of_words(words: torch.Tensor) -> torch.Tensor:
    """Return the fingerprint of words (int64) by torch's operations: the definition."""
    low_keys, high_keys = _keys_on(words.device)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for begin in range(0, len(words), _PART_WORDS):
        part = words[begin : begin + _PART_WORDS]
        count = -(-len(part) // BLOCK)
        blocks = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).view(
            count, BLOCK
        )
        weights = _weights(begin // BLOCK, count, words.device)
        low, high = blocks & _MASK, (blocks >> 32) & _MASK
        products = ((low + low_keys) & _MASK) * ((high + high_keys) & _MASK)
        sums = products.sum(1), blocks.sum(1)
        total += torch.stack([(_mixed(one) * weights).sum() for one in sums])
    return total


def _mixed(values: torch.Tensor) -> torch.Tensor:
    return values ^ ((values >> 32) & _MASK)


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(first, first + count, device=device)
    return (2 * numbers + 1) * (FACTOR - 2**64)


@cache
def host_keys() -> Any:
    """Return the keys of the low and of the high halves."""
    return np.random.Generator(np.random.PCG64(49)).integers(
        0, 2**32, (2, BLOCK), dtype=np.uint64
    )


@cache
def _keys_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = torch.from_numpy(host_keys().astype(np.int64)).to(device)
    return low, high


@cache
def _threads(count: int) -> WorkQueue:
    return WorkQueue("ebbtide-fingerprint", count)


def _of_host(words: torch.Tensor) -> torch.Tensor:
    """Return `of_words` by a compiled loop that reads memory once, on as many threads
    as torch has."""
    # numba takes long to import.
    from ebbtide.interleave.engine.numerics.compiled_tensors import sum_blocks

    array = words.numpy().view(np.uint64)
    low, high = host_keys()
    threads = torch.get_num_threads()
    if threads == 1 or len(array) < _PART_WORDS // 2:
        sums = sum_blocks(array, low, high, _FACTOR, 0)
    else:
        blocks = -(-len(array) // BLOCK)
        first = [blocks * number // threads for number in range(threads + 1)]
        pool = _threads(threads)
        queued = [
            pool.submit(
                sum_blocks,
                array[begin * BLOCK : end * BLOCK],
                low,
                high,
                _FACTOR,
                begin,
            )
            for begin, end in pairwise(first)
        ]
        sums = sum(each.result() for each in queued)
    return torch.from_numpy(sums.view(np.int64))
