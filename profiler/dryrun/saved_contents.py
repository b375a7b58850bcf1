"""Content that the job saves: it stays in memory as fake tensors of the host, and a file has a number in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from ebbtide.profiler.dryrun.errors import CannotFakeError

_MARK = b"ebbtide dry run: not a checkpoint, "
MARK_BYTES = len(_MARK) + 8


class SavedTensor:
    """A tensor of saved content: a copy on the host, and the device that it came from."""

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
    """Contents that were saved in this dry run, by number.

    Attributes:
        saves: How often the job has saved.
        saved_bytes: Bytes of the tensors, those of a shared storage once for each time.
    """

    def __init__(self) -> None:
        self.saves = self.saved_bytes = 0
        self._contents: list[Any] = []

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
        """Count content and copy it to the host; return what a file has in its place."""
        self.count(content)
        self._contents.append(tree_map_only(torch.Tensor, SavedTensor, content))
        return _MARK + b"%07d\n" % (len(self._contents) - 1)

    def restore(self, mark: bytes, device: Any) -> Any:
        """Return saved content on a device, None: the devices that it came from.

        Raises:
            CannotFakeError: A whole module or optimizer was saved.
        """
        content = self._contents[int(mark[len(_MARK) :])]
        for leaf in tree_iter(content):
            if isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)):
                raise CannotFakeError(
                    f"cannot dry-run torch.load of a {type(leaf).__name__} that was saved in this run: save its "
                    "state_dict()"
                )
        return tree_map_only(SavedTensor, lambda tensor: tensor.restore(device), content)


def is_mark(head: bytes) -> bool:
    """Return whether a file begins with a number of saved content."""
    return head.startswith(_MARK)
