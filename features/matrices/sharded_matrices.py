"""Matrices that are sharded over ranks and updated as a whole.

One rank, the owner of a matrix, updates it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.params.exchange import Exchange, Shape, Tensors
from ebbtide.interleave.engine.params.local_shards import local_shard


class ShardedMatrices(Exchange):
    """Matrices whose parts the ranks of a process group have, by index: their shapes
    and the divided dimension.

    Parts are as torch.chunk makes them. The owners: the largest matrices first, each
    goes to the rank with the fewest elements so far. Messages are on a device.
    """

    def __init__(
        self,
        divided: Mapping[int, tuple[Shape, int]],
        group: Any = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self._divided, self._group, self._device = divided, group, device
        self._ranks: int = dist.get_world_size(group) if divided else 1
        loads = [0] * self._ranks
        # In the order of messages, as are the shapes of the matrices that this rank
        # owns.
        for index in sorted(divided, key=lambda index: -math.prod(divided[index][0])):
            owner = self.owners[index] = loads.index(min(loads))
            loads[owner] += math.prod(divided[index][0])
        own_rank = dist.get_rank(group) if divided else 0
        self.own = {
            index: divided[index][0]
            for index, owner in self.owners.items()
            if owner == own_rank
        }

    def gather(
        self, parts: Mapping[int, Tensors], are_read: bool = True
    ) -> dict[int, Tensors]:
        sizes = {index: math.prod(shape) for index, shape in self.own.items()}
        whole: dict[int, Tensors] = {}
        for index, own in parts.items():
            whole[index] = [part.new_empty(sizes.get(index, 0)) for part in own]
        if parts and are_read:
            self._exchange(self._by_owner(parts), self._by_rank(whole))
        return whole

    def scatter(
        self, whole: Mapping[int, Tensors], parts: Mapping[int, Tensors]
    ) -> None:
        if parts:
            self._exchange(self._by_rank(whole), self._by_owner(parts))

    def add(self, values: Mapping[int, float]) -> dict[int, float]:
        if not self.owners:
            return {}
        sums = torch.tensor(
            [values.get(index, 0.0) for index in self.owners], dtype=torch.float64
        ).to(self._device)
        dist.all_reduce(sums, group=self._group)
        return dict(zip(self.owners, sums.tolist(), strict=True))

    def _by_owner(self, parts: Mapping[int, Tensors]) -> list[list[torch.Tensor]]:
        owners = [
            (owner, parts[index])
            for index, owner in self.owners.items()
            if index in parts
        ]
        return [
            [part for owner, own in owners if owner == rank for part in own]
            for rank in range(self._ranks)
        ]

    def _by_rank(self, whole: Mapping[int, Tensors]) -> list[list[torch.Tensor]]:
        own = [(index, tensor) for index in self.own for tensor in whole.get(index, ())]
        return [
            [self._part(index, tensor, rank) for index, tensor in own]
            for rank in range(self._ranks)
        ]

    def _part(self, index: int, whole: torch.Tensor, rank: int) -> torch.Tensor:
        shape, dim = self._divided[index]
        begin, end = (
            min(shape[dim], number * -(-shape[dim] // self._ranks))
            for number in (rank, rank + 1)
        )
        return whole.view(shape).narrow(dim, begin, end - begin)

    def _exchange(
        self, sent: Sequence[list[torch.Tensor]], received: Sequence[list[torch.Tensor]]
    ) -> None:
        """Send tensors to each rank, and write what each rank sends to others."""
        sources, targets = (
            [tensor for tensors in each for tensor in tensors]
            for each in (sent, received)
        )
        sizes = [
            [sum(tensor.nbytes for tensor in tensors) for tensors in each]
            for each in (received, sent)
        ]
        arrived = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=self._device)
        outgoing = [
            source.contiguous().view(-1).view(torch.uint8).to(self._device)
            for source in sources
        ]
        dist.all_to_all_single(
            arrived, torch.cat([arrived[:0], *outgoing]), *sizes, group=self._group
        )
        for target, part in zip(
            targets, arrived.split([target.nbytes for target in targets]), strict=True
        ):
            # A copy begins where any type may begin.
            target.copy_(part.clone().view(target.dtype).view(target.shape))


def sharded_matrices(
    params: Sequence[torch.Tensor], is_matrix: Sequence[bool]
) -> ShardedMatrices:
    """Return those parameters that are updated as whole matrices and sharded.

    Raises EngineError if a matrix is not in the order of its memory, or not sharded
    over one group of ranks."""
    divided: dict[int, tuple[Shape, int]] = {}
    groups: dict[tuple[int, ...], tuple[Any, str]] = {}
    for index, param in enumerate(params):
        if not is_matrix[index]:
            continue
        if param.dim() != 2 or not local_shard(param).is_contiguous():
            raise EngineError(
                f"a parameter of shape {tuple(param.shape)} is no matrix in the order "
                "of its memory, which this rule "
                "updates as a whole: put it into a group with another rule, such as "
                "{'params': ..., 'rule': 'adamw'}"
            )
        for axis, placement in enumerate(getattr(param, "placements", ())):
            mesh = param.device_mesh
            if mesh.size(axis) > 1 and not placement.is_replicate():
                group = mesh.get_group(axis)
                groups[tuple(dist.get_process_group_ranks(group))] = (
                    group,
                    mesh.device_type,
                )
                divided[index] = tuple(param.shape), placement.dim
    if len(groups) > 1:
        raise EngineError(
            "matrices are sharded over several groups of ranks, and their rule updates "
            "them as a whole: shard them "
            "over one dimension of one mesh, or put them into a group with another rule"
        )
    return ShardedMatrices(divided, *next(iter(groups.values()), ()))
