"""Functions that perform the kinds of operations of the core, see `Kind.perform`."""

from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.operations import Op


def gradient_down(store: Store, op: Op) -> None:
    store.copy_gradient_to_host(op.subgroup)


def gradient_up(store: Store, op: Op) -> None:
    store.return_gradient(op.subgroup)


def clip(store: Store, op: Op) -> None:
    """Do nothing.

    All gradients are on the host by then, and the clip factor is in the scalars.
    """


def fetch(store: Store, op: Op) -> None:
    store.states.issue_to_device(op.subgroup)


def flush(store: Store, op: Op) -> None:
    store.flush(op)


def update(store: Store, op: Op) -> None:
    if op.resource == "cpu":
        store.update_on_cpu(op)
    else:
        store.update_on_gpu(op)


def cast(store: Store, op: Op) -> None:
    store.cast_master(op.subgroup)


def upload(store: Store, op: Op) -> None:
    store.copy_params_to_device(op.subgroup)
