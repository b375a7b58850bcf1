"""The lower bound of the iteration of plans that also move weights and activations of layers: a linear program."""

from ebbtide.interleave.model.durations import link_rates
from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.interleave.simulation.linear_program import LinearProgram
from ebbtide.machines.machine import Machine


def min_layer_iteration_s(workload: Workload, machine: Machine, rounds: int = 1) -> float:
    """Return the shortest iteration of any plan that fits the device, s, by the bytes that cannot be in its memory.

    Weights that the device does not hold when the forward begins, or when it ends, cross the link once for each. It
    holds activations in some form until the backward, or they cross it twice. Subgroups are updated on the CPU, with
    state that stays on the device, or with state that crosses the link.

    Args:
        rounds: Forwards with their backward in an iteration.
    """
    program, compute_s = LinearProgram(), workload.compute_s
    weights = sum(workload.param_bytes * layer.params for layer in workload.layers)
    unit = weights + sum(layer.forms[0].nbytes for layer in workload.layers) + workload.params
    # Bytes are in this unit, times in that of the compute.
    length, up, down = (program.add_variable(name) for name in ("length", "up", "down"))
    at_start, at_turn = (program.add_variable(name, upper=weights / unit) for name in ("at start", "at turn"))
    on_cpu, resident, moved = (program.add_variable(name, upper=1.0) for name in ("cpu", "resident", "moved"))
    if machine.gpu_update_params_per_s is None:
        program.limit(resident, 0.0)
        program.limit(moved, 0.0)
    program.add_row({on_cpu: 1.0, resident: 1.0, moved: 1.0}, 1.0, 1.0)
    state, gradients = (width * workload.params / unit for width in (workload.state_bytes, workload.grad_bytes))
    recomputed: dict[int, float] = {}
    in_round: dict[int, float] = {}
    crossing: dict[int, float] = {}
    for number, layer in enumerate(workload.layers):
        shares = {}
        for form_number, form in enumerate(layer.forms):
            for side in ("device", "host"):
                share = program.add_variable(f"{side} {form_number}", number, upper=1.0)
                shares[share] = 1.0
                recomputed[share] = -form.recompute_s / compute_s
                if side == "device":
                    in_round[share] = form.nbytes / unit / rounds
                else:
                    crossing[share] = -form.nbytes / unit
        program.add_row(shares, 1.0, 1.0)
    program.add_row({length: 1.0, **recomputed}, 1.0)
    missing = {at_start: rounds, at_turn: rounds}
    program.add_row({up: 1.0, **missing, moved: -state, **crossing}, 2 * rounds * weights / unit)
    program.add_row({down: 1.0, moved: -state, on_cpu: -gradients, **crossing}, 0.0)
    free = workload.gpu_free
    if free is not None:
        turn_s = workload.other_s + workload.forward_s
        at_the_turn = max(value_at(free, turn_s), value_at(free, turn_s * (1 - 1e-9)))
        program.add_row({at_start: 1.0, resident: state}, upper=value_at(free, 0.0) / unit)
        program.add_row({at_turn: 1.0, resident: state, **in_round}, upper=at_the_turn / unit)
    traffic = workload.cpu_update_bytes * workload.params / unit
    on_gpu = workload.params / (machine.gpu_update_params_per_s or 1.0) / compute_s
    cpu_s = workload.params / (machine.cpu_update_rate(workload.master) or 1.0) / compute_s
    program.add_row({length: 1.0, on_cpu: -cpu_s}, 0.0)
    program.add_row({length: 1.0, resident: -on_gpu, moved: -on_gpu}, 0.0)
    rates = link_rates(workload, machine)
    for rate, terms in (
        (rates["h2d"], {up: 1.0}),
        (rates["d2h"], {down: 1.0}),
        (machine.duplex_bytes_per_s, {up: 1.0, down: 1.0}),
        (machine.host_memory_bytes_per_s, {up: 1.0, down: 1.0, on_cpu: traffic}),
    ):
        if rate:
            program.add_row({length: rate * compute_s / unit, **{key: -value for key, value in terms.items()}}, 0.0)
    values = program.minimize(length)
    # No plan fits: the compute alone is a bound all the same.
    return compute_s if values is None else compute_s * float(values[length]) * (1 - 1e-9)
