"""Compare what fixed and alternating orders of updates read and write, by the size of
subgroups (docs/storage.md).

    PYTHONPATH=. python benchmarks/storage_order.py

Simulated with the rates of examples/machine-desktop-nvme.json; nothing is measured.
With alternating orders an iteration begins with the subgroups that the one before has
left in the buffers: these are neither read nor written.
"""

from __future__ import annotations

from pathlib import Path

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import load_machine

MACHINE = load_machine(
    Path(__file__).parents[1] / "examples" / "machine-desktop-nvme.json"
)
PARAMS, HOST_BYTES = 7 * 10**9, 72e9
SUBGROUPS = (400, 200, 100, 50, 25)


def main() -> None:
    print("subgroup (M)  buffers (GB)  moved (GB)  alternating (GB)  iteration (s)")
    for millions in SUBGROUPS:
        size = millions * 10**6
        job = Workload(
            "7B",
            PARAMS,
            size,
            2.05,
            4.1,
            gpu_free=((0.0, 5e9),),
            host_free_bytes=HOST_BYTES,
        )
        plan = make_plan("pipelined", job, MACHINE)
        schedule = simulate(plan, job, MACHINE)
        moved, buffers = (
            schedule.moved_bytes("storage_read") / 1e9,
            sum(plan.storage_buffers) / 1e9,
        )
        columns = (millions, buffers, moved, moved - buffers, schedule.iteration_s)
        print(f"{columns[0]:12}" + "".join(f"{value:14.2f}" for value in columns[1:]))


if __name__ == "__main__":
    main()
