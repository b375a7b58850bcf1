"""Functions that perform reads and writes of storage, see `Kind.perform`."""

from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.operations import Op


def read(store: Store, op: Op) -> None:
    store.states.load(op.subgroup, op.tag)


def write(store: Store, op: Op) -> None:
    store.states.save(op.subgroup)
