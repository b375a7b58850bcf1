"""Process groups of several ranks in one process, which is rank 0 of them."""

import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, rendezvous
from torch.testing._internal.distributed import fake_pg

from ebbtide.features.dryrun.peers import Peers
from ebbtide.profiler.agent.patches import Patches

# A value that another rank would put in the store never comes.
_STORE_TIMEOUT = timedelta(seconds=1)
_GROUP_TIMEOUT = timedelta(minutes=10)
_NCCL_VERSION = (2, 27, 5)
_ADDRESS, _PORT = "127.0.0.1", "29500"


class ProcessGroups:
    """Makes every process group a fake one, whose collectives return at once, until
    `remove`.

    Groups keep the name of the backend that the job asked for. The values that other
    ranks would send are this rank's own, or not known. `ranks`: None where not stated,
    and the job has one; `ranks_per_node`: None for all of them."""

    def __init__(
        self,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._peers = peers or Peers()
        self.rank = self._peers.rank
        self.ranks = ranks or 1
        self.ranks_per_node = min(ranks_per_node or self.ranks, self.ranks)
        self.stated = ranks is not None
        self._initialized = False

    def install(self, patches: Patches) -> None:
        """Replace functions of torch.distributed until `patches.undo()`, and set the
        environment as torchrun does."""
        self._patches = patches
        if self.stated:
            self.set_environment()
        self._original_init = distributed_c10d.init_process_group
        self._original_helper = distributed_c10d._new_process_group_helper
        patches.set(distributed_c10d, "_new_process_group_helper", self._new_group)
        for owner in (dist, distributed_c10d):
            patches.set(owner, "init_process_group", self._init)
            patches.set(owner, "is_nccl_available", lambda: True)
            patches.set(owner, "monitored_barrier", _nothing)
            patches.set(owner, "ProcessGroupNCCL", _NcclGroup)
        # Functions that a module has got by their name come here, too.
        for owner in (dist, distributed_c10d, rendezvous):
            patches.set(owner, "rendezvous", self._meet)
        for owner in (dist, distributed_c10d):
            patches.set(owner, "TCPStore", _new_store)
        patches.set(torch.multiprocessing, "spawn", _run_first)
        patches.set(dist, "_verify_params_across_processes", lambda *_args: None)
        patches.set(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)
        # A new group makes dynamo classify torch's functions again, which it cannot do
        # while they are replaced.
        patches.set(torch._dynamo.trace_rules, "clear_lru_cache", lambda: None)

    def state(self, ranks: int) -> None:
        """State the ranks of the job, on one host, before it makes a group."""
        self.ranks = self.ranks_per_node = ranks
        self.stated = True
        self.set_environment()

    def set_environment(self) -> None:
        """Set the variables of the environment that launchers set."""
        self._patches.set_variables(self._variables())

    def remove(self) -> None:
        """Leave the groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def notes(self, peer_bytes_per_s: float | None) -> list[str]:
        """Return lines for people about the ranks."""
        if self.ranks > 1:
            rate = (
                f" at up to {peer_bytes_per_s / 1e9:,.0f} GB/s between GPUs"
                if peer_bytes_per_s
                else ""
            )
            run = self._peers.ranks
            rank, verb = ("ranks", "were") if len(run) > 1 else ("rank", "was")
            return [
                f"{rank} {str(run)[1:-1]} of {self.ranks:,} {verb} predicted; "
                "the others are taken to be alike, "
                "and in time. Collectives "
                f"run as rings{rate}. NCCL's own memory is not included (typically 0.2 "
                "to 1 GB per rank)"
            ]
        if self._initialized and not self.stated:
            return [
                "the job makes a process group, and ran as its only rank; state the "
                "number of ranks with --ranks"
            ]
        return []

    def _variables(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank % self.ranks_per_node),
            "GROUP_RANK": str(self.rank // self.ranks_per_node),
            "ROLE_RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_WORLD_SIZE": str(-(-self.ranks // self.ranks_per_node)),
            "ROLE_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", _ADDRESS),
            "MASTER_PORT": os.environ.get("MASTER_PORT", _PORT),
            "TORCHELASTIC_RUN_ID": "dry-run",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }

    def _init(self, backend: str | None = None, *_args: Any, **options: Any) -> None:
        """Make the default group, of the stated ranks whatever the job's arguments
        say."""
        self._initialized = True
        self._original_init(
            "gloo" if backend == "mpi" else backend,
            store=_new_store(),
            rank=self.rank,
            world_size=self.ranks,
            timeout=options.get("timeout") or _GROUP_TIMEOUT,
            device_id=options.get("device_id"),
        )

    def _meet(self, *_url: Any, **_options: Any) -> Any:
        """Yield what a meeting of the ranks gives: a store, the rank and their
        number."""
        self._initialized = True
        yield _new_store(), self.rank, self.ranks

    def _new_group(
        self,
        size: int,
        rank: int,
        ranks: list[int],
        backend: Any,
        store: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Make a fake group under the name of the backend that was asked for."""
        for name in ("backend_options", "device_id"):
            if name in kwargs:
                kwargs[name] = None
        group, prefix_store = self._original_helper(
            size, rank, ranks, dist.Backend.FAKE, store, *args, **kwargs
        )
        world = distributed_c10d._world
        if group in world.pg_map:
            world.pg_map[group] = dist.Backend(backend), prefix_store
            world.pg_backend_config[group] = str(
                distributed_c10d.BackendConfig(dist.Backend(backend))
            )
        return group, prefix_store


def _new_store(*_args: Any, **_kwargs: Any) -> Any:
    """Return a store of this process, which waits for nobody for long."""
    store = dist.HashStore()
    store.set_timeout(_STORE_TIMEOUT)
    return store


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Return at once, since there are no other ranks to wait for or to differ from."""


def _run_first(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *_options: Any,
    **_settings: Any,
) -> None:
    """Run the first of the processes that `torch.multiprocessing.spawn` starts, in this
    one."""
    function(0, *args)


class _NcclOptions:
    """Options of NCCL that a job sets and nothing reads."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.config = SimpleNamespace()


class _NcclGroup:
    """Stands in for the class of NCCL's groups, whose options jobs set."""

    Options = _NcclOptions


def patch_ray_train(patches: Patches, groups: ProcessGroups) -> None:
    """Let Ray Train run its function in this process, as one of the workers, until
    `patches.undo()`."""

    def patch(module: Any) -> None:
        def fit(trainer: Any) -> Any:
            if not groups.stated:
                groups.state(max(1, trainer.scaling_config.num_workers))
            return trainer._get_local_controller().run(trainer._get_train_func())

        patches.set(module.DataParallelTrainer, "fit", fit)

    patches.when_imported("ray.train.v2.api.data_parallel_trainer", patch)


assert fake_pg  # it registers the backend
