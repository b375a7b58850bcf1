"""What is true of the job as a whole: where it runs, and the model and optimizers seen at its first update."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from .model_info import describe_model, describe_optimizers


class Facts:
    """Kept in `facts-HOST-PID.json` beside the spool, replaced whole at each change; never raises."""

    def __init__(self, torch: Any, directory: str) -> None:
        self._torch = torch
        self._directory = directory
        self._name: str | None = None
        self._data: dict[str, Any] = {"notes": []}
        self.host = socket.gethostname()
        self._described: WeakSet[Any] = WeakSet()

    def place(self) -> tuple[int, int, int]:
        """(rank, world size, local rank), from torch.distributed where it runs, else from the environment."""
        rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        distributed = getattr(self._torch, "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        return rank, world, _number("LOCAL_RANK", 0)

    def begin(self, name: str) -> None:
        """The first phase: `name` is that of the spool this belongs to."""
        self._name = name
        rank, world, local = self.place()
        torch = self._torch
        self._data.update(
            pid=os.getpid(),
            host=self.host,
            rank=rank,
            world_size=world,
            local_rank=local,
            argv=list(sys.argv),
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            threads={"torch": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")},
            devices=self._devices(),
        )
        self.write()

    def training(self, modules: Iterable[Any], optimizers: Iterable[Any]) -> None:
        """An update has ended. What is new in it is described, now that its state exists."""
        # One that has skipped its first step has no state yet.
        new = [
            o
            for o in optimizers
            if o not in self._described and hasattr(o, "param_groups") and not getattr(o, "overflow", False)
        ]
        if not new:
            return
        try:
            for optimizer in new:
                self._described.add(optimizer)
            self._data["devices"] = self._devices()
            known = list(self._described)
            self._data["model"] = describe_model(list(modules), known)
            self._data["optimizers"] = describe_optimizers(known)
        except Exception as error:
            self.note(f"the model's facts could not be read: {error!r}")
        self.write()

    def tell(self, key: str, value: Any) -> None:
        """One more fact: anything that JSON can hold."""
        self._data[key] = value
        self.write()

    def note(self, text: str) -> None:
        """Something the reader of the trace should know."""
        self._data["notes"].append(text)
        self.write()

    def write(self) -> None:
        if self._name is None:
            return
        path = os.path.join(self._directory, f"facts-{self._name}.json")
        try:
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(self._data, file)
            os.replace(path + ".new", path)
        except (OSError, ValueError, TypeError):
            pass  # a full disk, say: the spool's header has what the trace cannot do without

    def _devices(self) -> list[dict[str, Any]]:
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return []
        index = cuda.current_device()
        properties = cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        return [
            {
                "device": f"cuda:{index}",
                "kind": "cuda",
                "name": properties.name,
                "capacity_bytes": properties.total_memory,
                "uuid": f"GPU-{uuid}" if uuid is not None else None,
            }
        ]


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return default
