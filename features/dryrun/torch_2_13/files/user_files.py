"""Keeps the files of the user as they are: what the job saves is counted, and what it
loads gives fake tensors."""

import io
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.files.loggers import disable_loggers
from ebbtide.features.dryrun.files.patching import FileFunctions, absolute
from ebbtide.features.dryrun.files.programs import leave_out_programs
from ebbtide.features.dryrun.files.view import FileView, guard, is_inside, outermost
from ebbtide.features.dryrun.files.writers import patch_writers
from ebbtide.features.dryrun.torch_2_13.device.fake_device import FakeDeviceMode
from ebbtide.features.dryrun.torch_2_13.files.safetensors_files import patch_safetensors
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import MAX_ELEMENTS
from ebbtide.profiler.agent.patches import Patches
from ebbtide.units import bytes_text

# Checkpoints up to this size are read, so that steps and random states in them have
# values.
_MAX_READ_BYTES = 64 << 20
_MAX_LISTED = 8
_MARK = b"ebbtide dry run: not a checkpoint, "
_TOKEN_BYTES = 8
MARK_BYTES = len(_MARK) + _TOKEN_BYTES + 8


class UserFiles:
    """The files that the job saves, loads and removes; `opened`: those that it opened
    for writing, in order."""

    def __init__(self, mode: FakeDeviceMode) -> None:
        self.opened: dict[str, None] = {}
        self._mode = mode
        self._saved = SavedContents()
        self._view: FileView | None = None
        self._listing = True
        self._programs: dict[str, None] = {}

    def install(self, patches: Patches) -> None:
        """Replace what saves, loads and changes files until `patches.undo()` and
        `close()`."""
        self._view = FileView()
        FileFunctions(self._view, self._note_opened).install(patches)
        leave_out_programs(patches, lambda name: self._programs.setdefault(name))
        guard.start(self._view)
        patches.set(torch, "save", self._save)
        patches.set(torch, "load", self._wrap_load(torch.load))
        patch_safetensors(patches, self._save_tensors)
        disable_loggers(patches)
        patch_writers(patches, self._view)
        patches.when_imported(
            "torch.distributed.checkpoint",
            lambda module: self._patch_distributed(module, patches),
        )

    def stop_listing(self) -> None:
        """List no more files: the job is at its end."""
        self._listing = False

    def close(self) -> None:
        """Remove what the job has made, when its replacements are undone."""
        guard.stop()
        if self._view is not None:
            self._view.close()

    def lines(self) -> list[str]:
        """Return lines for people about files."""
        lines = []
        if self._saved.saves:
            times = "once" if self._saved.saves == 1 else f"{self._saved.saves} times"
            size = bytes_text(self._saved.saved_bytes)
            lines.append(
                f"the job saved {times}, {size} in all: nothing of it was written"
            )
        if self.opened:
            lines.append(
                "the job opened files for writing; new ones were removed again: "
                f"{_listed(self.opened)}"
            )
        if self._view is not None and self._view.preserved:
            preserved = _listed(self._view.preserved)
            lines.append(
                "files that the job changed, removed or renamed are as they were: "
                f"{preserved}"
            )
        if self._programs:
            lines.append(
                "programs that the job called to change files were not run: "
                f"{', '.join(self._programs)}"
            )
        return lines

    def _note_opened(self, path: str) -> None:
        if self._listing:
            self.opened[path] = None

    def _save(self, content: Any, file: Any, *_args: Any, **_kwargs: Any) -> None:
        """Keep what would have been saved in memory, as `torch.save` takes it."""
        self._write(file, self._saved.keep(content))

    def _save_tensors(self, tensors: dict[str, Any], file: Any, header: bytes) -> None:
        """Count tensors that would have been saved, and write their header for the job
        alone."""
        self._saved.count(tensors)
        for tensor in tensors.values():
            tensor.detach().cpu()  # as saving does
        if file is not None:
            self._write(file, header)

    def _write(self, file: Any, data: bytes) -> None:
        path = absolute(file)
        if path is None:
            file.write(data)
        elif self._view is not None and self._view.is_protected(path):
            with self._view.lock:
                Path(self._view.stand_in(path)).write_bytes(data)

    def _wrap_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            head = _read_head(f)
            if head.startswith(_MARK):
                return self._saved.restore(head, _device_of(map_location))
            locations: dict[int, str] = {}

            def to_host(storage: Any, location: str) -> Any:
                locations[storage._cdata] = location
                return storage

            is_path = isinstance(f, (str, os.PathLike))
            if is_path and os.path.isfile(f) and os.path.getsize(f) > _MAX_READ_BYTES:
                kwargs.pop("mmap", None)
                self._mode.enabled = False
                try:
                    with self._mode.fake_mode:
                        content = original(f, "cpu", *args, **kwargs)
                finally:
                    self._mode.enabled = True
            else:
                content = original(f, to_host, *args, **kwargs)

            def place(tensor: Any) -> Any:
                location = locations.get(tensor.untyped_storage()._cdata, "cpu")
                return self._loaded(tensor, _device_of(map_location, location))

            return tree_map_only(torch.Tensor, place, content)

        return load

    def _loaded(self, tensor: Any, device: Any) -> Any:
        if tensor.numel() > MAX_ELEMENTS:
            tensor = self._mode.to_fake(tensor)
        return tensor.to(device)

    def _patch_distributed(self, module: Any, patches: Patches) -> None:
        """Replace the functions of torch.distributed.checkpoint."""

        def save(
            state_dict: Any, *, checkpoint_id: Any = None, **_options: Any
        ) -> None:
            content = {
                key: value.state_dict() if hasattr(value, "state_dict") else value
                for key, value in state_dict.items()
            }
            if checkpoint_id is None:
                self._save(content, io.BytesIO())
            else:
                os.makedirs(checkpoint_id, exist_ok=True)
                self._save(content, os.path.join(checkpoint_id, ".metadata"))

        def save_later(state_dict: Any, **options: Any) -> Any:
            save(state_dict, **options)
            future: Future[None] = Future()
            future.set_result(None)
            return future

        def load(
            state_dict: Any, *, checkpoint_id: Any = None, **_options: Any
        ) -> None:
            """Leave the tensors as they are: a checkpoint has the shapes of the state
            that it is loaded into."""
            if checkpoint_id is not None and not os.path.isdir(checkpoint_id):
                raise FileNotFoundError(f"no checkpoint at {checkpoint_id}")

        for name, function in (
            ("save", save),
            ("async_save", save_later),
            ("load", load),
        ):
            patches.set(module, name, function)


def _device_of(map_location: Any, saved: str | None = None) -> Any:
    """Return the device that `torch.load` loads to; None: the tensor's own. `saved`:
    the device in the file."""
    if isinstance(map_location, (str, torch.device)):
        return map_location
    if isinstance(map_location, dict):
        return map_location.get(saved, saved)
    return saved if map_location is None else "cpu"


def _read_head(file: Any) -> bytes:
    """Return the first bytes of a path or a file, whose position stays; none where they
    cannot be read."""
    if isinstance(file, (str, os.PathLike)):
        if not os.path.isfile(file):
            return b""
        with open(file, "rb") as opened:
            return opened.read(MARK_BYTES)
    if not (hasattr(file, "seek") and hasattr(file, "tell")):
        return b""
    position = file.tell()
    head = file.read(MARK_BYTES)
    file.seek(position)
    return head if isinstance(head, bytes) else b""


def _listed(paths: dict[str, None]) -> str:
    """Return paths for people: without those in a folder that is listed, and the first
    ones only."""
    names = [
        os.path.relpath(path) if is_inside(path, os.getcwd()) else path
        for path in outermost(paths)
    ]
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest


class SavedTensor:
    """A tensor of saved content: a copy on the host, and the device that it came
    from."""

    def __init__(self, tensor: Any) -> None:
        self.device = tensor.device
        host = tensor.detach()
        self.copy = host.clone() if host.device.type == "cpu" else host.cpu()
        self.requires_grad = tensor.requires_grad
        self.is_parameter = isinstance(tensor, torch.nn.Parameter)

    def restore(self, device: Any) -> Any:
        """Return a tensor on a device, None: the one that it came from."""
        tensor = self.copy.to(self.device if device is None else device, copy=True)
        if self.is_parameter:
            return torch.nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


class SavedContents:
    """Contents that were saved in this dry run; `saved_bytes` counts a shared storage
    once for each time."""

    def __init__(self) -> None:
        self.saves = self.saved_bytes = 0
        self._contents: list[Any] = []
        # It tells the marks of this dry run from those of others.
        self._mark = _MARK + os.urandom(_TOKEN_BYTES // 2).hex().encode()

    def count(self, content: Any) -> None:
        """Count tensors that would be saved."""
        sizes = {}
        for tensor in tree_iter(content):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                sizes[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
        self.saves += 1
        self.saved_bytes += sum(sizes.values())

    def keep(self, content: Any) -> bytes:
        """Count content and copy it to the host; return what a file has in its
        place."""
        self.count(content)
        self._contents.append(tree_map_only(torch.Tensor, SavedTensor, content))
        return self._mark + b"%07d\n" % (len(self._contents) - 1)

    def restore(self, mark: bytes, device: Any) -> Any:
        """Return saved content on a device, None: the devices that it came from."""
        if not mark.startswith(self._mark):
            raise CannotFakeError(
                "cannot dry-run torch.load of a file that another dry run has in the "
                "same folder: run them one after the other"
            )
        content = self._contents[int(mark[len(self._mark) :])]
        for leaf in tree_iter(content):
            if isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)):
                raise CannotFakeError(
                    f"cannot dry-run torch.load of a {type(leaf).__name__} that was "
                    "saved in this run: save its "
                    "state_dict()"
                )
        return tree_map_only(
            SavedTensor, lambda tensor: tensor.restore(device), content
        )
