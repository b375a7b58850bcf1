"""The workload with layers of a decoder of known shape on a machine, and its plan with everything that may move."""

from dataclasses import replace

from ebbtide.errors import MachineError, WorkloadError
from ebbtide.interleave.advise.job.compute_times import TransformerCompute
from ebbtide.interleave.advise.job.training_job import TrainingJob
from ebbtide.interleave.model.workload import ActivationForm, Layer, Workload, with_layers
from ebbtide.machines.machine import Machine

# The CUDA context and workspaces.
_CONTEXT_BYTES = 1e9


def layered_workload(job: TrainingJob, machine: Machine) -> Workload:
    """Return the workload of a job of known shape on one GPU, with a chunk for each micro-step.

    Raises WorkloadError where the shape is not known or ranks share the parameters."""
    if not isinstance(job.compute, TransformerCompute) or job.settings.ranks > 1:
        raise WorkloadError("layers are known of a job of a given size on one rank")
    if machine.gpu_memory_bytes is None:
        raise MachineError(f"machine {machine.name} has no gpu_memory_bytes, which a plan for layers needs")
    shape, micro_steps = job.compute.shape, job.micro_steps
    settings = replace(job.settings, checkpointing=False)
    times = job.compute.times(machine, settings, micro_steps)
    tokens = shape.sequence * (settings.micro_batch or 1)
    # Of the forward; products of the vocabulary are in the rest.
    head = 2.0 * tokens * shape.vocabulary * shape.hidden / shape.forward_flops(tokens)
    forward_s, backward_s = (length * (1 - head) / shape.layers for length in (times.forward_s, times.backward_s))
    params = round(shape.layer_weights)
    forms = (
        ActivationForm("all", micro_steps * shape.layer_bytes(tokens), 0.0),
        ActivationForm("input", micro_steps * shape.kept_bytes(tokens, True) / shape.layers, forward_s),
    )
    ends = job.workload.params - shape.layers * params
    used = _CONTEXT_BYTES + 2 * shape.logit_bytes(tokens) + ends * (job.workload.param_bytes + job.workload.grad_bytes)
    workload = replace(
        job.workload,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        gpu_free=((0.0, max(0.0, machine.gpu_memory_bytes - used)),),
        missing_bytes=max(0.0, used - machine.gpu_memory_bytes),
        # All chunks pass a layer one after another, so that its gradient is complete when they have.
        gradients_held_until_step=False,
        sizes=None,
    )
    layers = [Layer(f"layer {number}", params, forward_s, backward_s, forms) for number in range(shape.layers)]
    return with_layers(workload, layers, micro_steps, workload.name)
