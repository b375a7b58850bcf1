"""The log of a driven process: a line of JSON for each event."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any, TextIO

import torch

from ebbtide.interleave.engine.params.local_shards import local_shard, own_rank

# Larger tensors are no losses.
MAX_LOSS_ELEMENTS = 4096


class RunLog:
    """Writes the events of a process into a folder.

    The file is made at the first step of an optimizer: many processes of a job have
    none.
    """

    def __init__(self, folder: str) -> None:
        self.step = 0
        self._folder = folder
        self._file: TextIO | None = None
        self._lines: list[dict[str, Any]] = []
        self._losses: list[tuple[int, torch.Tensor]] = []

    @property
    def path(self) -> str | None:
        """The path of the file; None before the first line is written."""
        return None if self._file is None else self._file.name

    def add(self, kind: str, **values: Any) -> None:
        """Add an event of the current step."""
        self._lines.append({"kind": kind, "step": self.step, **values})

    def add_loss(self, tensor: torch.Tensor) -> None:
        """Add a tensor that a backward begins from, to be read at the next `flush`, so
        that no backward waits for a device."""
        if tensor.numel() <= MAX_LOSS_ELEMENTS:
            self._losses.append((self.step, local_shard(tensor).detach().clone()))

    def flush(self) -> None:
        """Write all events."""
        for step, tensor in self._losses:
            value = float(tensor.double().sum())
            bits = digest([tensor])
            self._lines.append(
                {"kind": "loss", "step": step, "bits": bits, "value": value}
            )
        self._losses.clear()
        if self._file is None:
            name = f"{own_rank()}-{os.getpid()}.jsonl"
            path = os.path.join(self._folder, name)
            self._file = open(path, "a")  # noqa: SIM115  To the end of the process.
        self._file.writelines(json.dumps(line) + "\n" for line in self._lines)
        self._file.flush()
        self._lines.clear()

    def forget(self) -> None:
        """Leave the file to the process that this one was forked from."""
        self._file = None
        self._lines.clear()
        self._losses.clear()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        for part in dense_parts(local_shard(tensor).detach()):
            flat = part.cpu().contiguous()
            # `numpy()` would mark the memory as an array's for ever.
            whole.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    return whole.hexdigest()[:16]


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor; indices and values if it is sparse."""
    if tensor.layout == torch.strided:
        return (tensor,)
    sparse = tensor.to_sparse_coo().coalesce()
    return sparse.indices(), sparse.values()
