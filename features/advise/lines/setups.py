"""The lines to paste for a policy: a configuration of DeepSpeed, FSDP2 calls, and the
optimizer."""

import json
import math
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

from ebbtide.features.advise.choice import OverlapChoice, PolicyChoice
from ebbtide.features.advise.job.training_job import TunableSettings
from ebbtide.features.advise.lines.fill_in import UNKNOWN, argument, argument_line, mark
from ebbtide.interleave.model.schedule import Schedule, available_host_bytes
from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.simulation.simulator import Steps
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, UPDATE

Budget = int | dict[str, int]
_ROUNDING = 1e-9
_BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_PRECISION = ("bf16", "fp16", "data_types")
# The policies that DeepSpeed's configuration alone selects.
_BY_CONFIGURATION = ("zero-offload", "twin-flow", "gpu-only")


@dataclass(frozen=True)
class PasteContext:
    """The job and the machine that lines are for; `machine_source`: its file or preset,
    None: it is to be measured."""

    job: RecordedJob
    machine: Machine
    machine_source: str | None = None

    @property
    def machine_code(self) -> str | None:
        """An expression for the machine, with the rates for as many ranks on a host as
        here; None without a source."""
        if self.machine_source is None:
            return None
        code = f"find_machine({json.dumps(self.machine_source)})"
        return (
            code
            if self.machine.box is None
            else f"{code}.for_ranks({self.machine.box.ranks})"
        )


def enable_code(
    schedule: Schedule, context: PasteContext, overlap: str = "none"
) -> str:
    """Return the call for a DeepSpeed job, to put before `deepspeed.initialize`."""
    imports, arguments = _common_arguments(schedule, context, overlap)
    # DeepSpeed's subgroups consist of whole tensors and may be larger than its
    # sub_group_size.
    largest = max(schedule.workload.subgroups)
    if largest > schedule.workload.subgroup_params:
        arguments.append("# DeepSpeed's subgroups are whole tensors: the largest one.")
    arguments.append(f"subgroup_params={largest:_}")
    arguments += _storage_arguments(schedule, context.machine)
    lines = ["from ebbtide.interleave.deepspeed import enable", *imports]
    return "\n".join([*lines, "", *_call("enable", arguments)])


def optimizer_code(
    schedule: Schedule, context: PasteContext, overlap: str = "none"
) -> str:
    """Return the call with an overlap for a job without DeepSpeed; it needs `model`."""
    workload, job = schedule.workload, context.job
    imports, arguments = _common_arguments(schedule, context, overlap)
    if overlap != "none":
        arguments.append("model=model")
    arguments = ["model.parameters()", *_optimizer_arguments(job), *arguments]
    arguments.append(f"subgroup_params={workload.subgroup_params:_}")
    norm = max_grad_norm(workload, job)
    if norm is not None:
        arguments.append(argument("max_grad_norm", norm))
    arguments += _storage_arguments(schedule, context.machine)
    comments = []
    if not workload.gradients_held_until_step:
        arguments.append('gradients="streamed"')
        comments.append('# Under DistributedDataParallel: gradients="kept".')
    if job.section("fp16").get("enabled"):
        arguments.append('loss_scale="dynamic"')
        comments.append("# Back-propagate optimizer.scale(loss).")
    lines = ["from ebbtide.interleave import InterleavedAdamW", *imports, "", *comments]
    return "\n".join([*lines, *_call("optimizer = InterleavedAdamW", arguments)])


def memory_budget(schedule: Schedule) -> Budget | None:
    """Return the bytes of device memory for state with which the engine makes the plan
    of the schedule: for `adaptive` what each phase leaves free, else what is free from
    the backward on, or what the plan needs if that is more. None if the free memory is
    not known, or such a plan uses no device memory."""
    workload = schedule.workload
    if workload.gpu_free is None:
        return None
    begin_s = workload.compute_s - workload.backward_s
    if not Policy.of_plan(schedule.plan).is_adaptive:
        free = _min_free(workload, begin_s, math.inf)
        return (
            max(int(free), math.ceil(schedule.peak_device_bytes))
            if schedule.peak_device_bytes
            else None
        )
    by_phase = {
        FORWARD: int(_min_free(workload, 0.0, begin_s)),
        BACKWARD: int(_min_free(workload, begin_s, workload.compute_s)),
        UPDATE: int(_min_free(workload, workload.compute_s, math.inf)),
    }
    return by_phase if len(set(by_phase.values())) > 1 else by_phase[UPDATE]


def _min_free(workload: Workload, begin_s: float, end_s: float) -> float:
    """Return the bytes that are free from one time of the iteration to another."""
    steps = workload.gpu_free or ()
    # A step at the end, up to rounding, is one of the next phase.
    end_s -= _ROUNDING * workload.compute_s
    return min(
        [
            value_at(steps, begin_s),
            *(size for at_s, size in steps if begin_s < at_s < end_s),
        ]
    )


def _common_arguments(
    schedule: Schedule, context: PasteContext, overlap: str
) -> tuple[list[str], list[str]]:
    policy, budget = Policy.of_plan(schedule.plan), memory_budget(schedule)
    plain = policy if overlap == "none" else policy.with_options(overlap="none")
    imports, arguments = [], [f"policy={json.dumps(plain.text)}"]
    if overlap != "none":
        arguments.append(f"overlap={json.dumps(overlap)}")
    # Plans of other policies do not depend on rates, but for how much they speculate or
    # store.
    uses_rates = policy.is_adaptive or schedule.plan.speculated or schedule.plan.stored
    if uses_rates and context.machine_code is not None:
        imports.append("from ebbtide.machines.catalog import find_machine")
        arguments.append(f"machine={context.machine_code}")
    if budget is not None:
        arguments.append("# All that was free; write less if others use the card, too.")
    if isinstance(budget, dict):
        phases = "".join(
            f'        "{phase}": {size:_},\n' for phase, size in budget.items()
        )
        arguments.append(f"memory_budget={{\n{phases}    }}")
    elif budget is not None:
        arguments.append(f"memory_budget={budget:_}")
    return imports, arguments


def _storage_arguments(schedule: Schedule, machine: Machine) -> list[str]:
    if not schedule.plan.stored:
        return []
    folders = [path.path for path in machine.storage]
    storage = "storage=..." if None in folders else f"storage={json.dumps(folders)}"
    host_bytes = available_host_bytes(schedule.workload, machine)
    return [storage, f"host_memory_budget={int(host_bytes or 0):_}"]


def _call(function: str, arguments: list[str]) -> list[str]:
    return [f"{function}(", *(f"    {argument_line(text)}" for text in arguments), ")"]


def _optimizer_arguments(job: RecordedJob) -> list[str]:
    options = {"lr": UNKNOWN, **job.optimizer_options}
    return [argument(key, value) for key, value in options.items()]


def deepspeed_config(
    workload: Workload, job: RecordedJob, ratio: float | None, stage: int = 3
) -> dict[str, Any]:
    """Return a configuration that `deepspeed.initialize` accepts, with the settings of
    the job, once marks are replaced (`fill_in`). `ratio`: share of the state that is
    offloaded to the CPU, stage 3 if below 1; None: nothing is."""
    offload: dict[str, Any] = {"device": "none"}
    if ratio is not None:
        offload = {"device": "cpu", "pin_memory": True, "ratio": ratio}
    # The recorded size may exceed the parameters; another one would change the layout
    # of checkpoints.
    configured = job.section("zero_optimization").get("sub_group_size")
    size = (
        int(configured)
        if isinstance(configured, (int, float)) and configured >= 1
        else workload.subgroup_params
    )
    zero = {"stage": stage, "offload_optimizer": offload, "sub_group_size": size}
    norm = max_grad_norm(workload, job)
    half = {"bf16": {"enabled": True}} if workload.param_bytes == 2 else {}
    sizes = job.settings(_BATCH)
    if not sizes.keys() & set(_BATCH[:2]):
        sizes = {_BATCH[1]: mark(_BATCH[1]), **sizes}
    elif _BATCH[1] in sizes and _BATCH[2] in sizes:
        # Follows from the others and the number of ranks.
        sizes.pop(_BATCH[0], None)
    return {
        "zero_optimization": zero,
        **(
            {}
            if norm is None
            else {
                "gradient_clipping": mark("gradient_clipping")
                if norm is UNKNOWN
                else norm
            }
        ),
        **(job.settings(_PRECISION) if job.config else half),
        **sizes,
        "optimizer": {"type": "AdamW", "params": {"lr": mark("lr")}},
        **job.settings(("optimizer", "scheduler")),
    }


def placeholders(workload: Workload, job: RecordedJob) -> list[str]:
    """Return the keys of the configuration whose values are not known."""
    keys = ["gradient_clipping"] if max_grad_norm(workload, job) is UNKNOWN else []
    keys += [] if job.settings(_BATCH[:2]) else ["train_micro_batch_size_per_gpu"]
    return keys + ([] if job.settings(("optimizer",)) else ["optimizer"])


def max_grad_norm(workload: Workload, job: RecordedJob) -> float | EllipsisType | None:
    """Return the maximum norm of the gradients, UNKNOWN where it is not known; None if
    they are not clipped."""
    if not job.is_configured:
        return UNKNOWN if workload.clipping else None
    norm = job.config.get("gradient_clipping")
    if norm == "auto":
        return UNKNOWN
    return float(norm) if isinstance(norm, (int, float)) and norm > 0 else None


_CHECKPOINTING = """from torch.distributed._composable import checkpoint

for layer in model.layers:  # the list of blocks of your model
    checkpoint(layer)"""
# With parameters in bf16, where the optimizer has fp32 masters; and with fp32
# parameters.
_FSDP2_HALF = """import torch
from torch.distributed.fsdp import fully_shard

model = model.to(torch.bfloat16)
for layer in model.layers:  # the list of blocks of your model
    fully_shard(layer)
fully_shard(model)"""
_FSDP2_MIXED = """import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:  # the list of blocks of your model
    fully_shard(layer, mp_policy=precision)
fully_shard(model, mp_policy=precision)"""


@dataclass(frozen=True)
class PolicySetup:
    """The lines to paste for one policy."""

    policy: str
    iteration_ms: float
    # A configuration that `deepspeed.initialize` accepts.
    deepspeed_config: dict[str, Any]
    # Lines of Python to run before `deepspeed.initialize`; None if the configuration
    # suffices.
    code: str | None
    # Lines of Python for a job without DeepSpeed; None for a policy that DeepSpeed has
    # by itself.
    optimizer_code: str | None
    # Whether state is in storage. Then the configuration of DeepSpeed does not do
    # without `code`.
    uses_storage: bool = False

    @property
    def offload_optimizer(self) -> dict[str, Any]:
        """The section of DeepSpeed's configuration on the optimizer's offload."""
        offload: dict[str, Any] = self.deepspeed_config["zero_optimization"][
            "offload_optimizer"
        ]
        return offload

    def blocks(self) -> dict[str, str]:
        """Return the lines for each framework, below a line on where they belong."""
        script = "In a script: keep torch.optim.AdamW."
        if self.optimizer_code is not None:
            script = f"Instead of torch.optim.AdamW:\n\n{self.optimizer_code}"
        deepspeed = (
            "In zero_optimization of DeepSpeed's configuration:\n\n"
            f'"offload_optimizer": {json.dumps(self.offload_optimizer)}'
        )
        if self.code is not None:
            deepspeed = (
                "Before deepspeed.initialize (stage 3; offload_optimizer stays "
                f'"cpu"):\n\n{self.code}'
            )
        return {"deepspeed": deepspeed, "script": script}


@dataclass(frozen=True)
class LinesToPaste:
    """The lines to paste for a plan."""

    # Lines for the job's framework: before `deepspeed.initialize`, or that make the
    # optimizer, with FSDP2 for ranks.
    python: str
    # A configuration that `deepspeed.initialize` accepts.
    deepspeed_config: dict[str, Any]
    # Lines for a job of DeepSpeed, before `deepspeed.initialize`; None if the
    # configuration suffices.
    deepspeed_code: str | None
    # Lines that switch on activation checkpointing; None without it.
    checkpointing: str | None
    fsdp2: str | None  # Lines that shard the model; None with one rank.
    optimizer: str  # Lines that make the optimizer of a job without DeepSpeed.


def setup_of(steps: Steps, context: PasteContext) -> PolicySetup:
    """Return the lines to paste for a policy without overlap."""
    policy, job = Policy.of_plan(steps.plan), context.job
    schedule, stored = steps.valid, bool(steps.plan.stored)
    workload, code, own_code = schedule.workload, None, None
    if policy.name not in _BY_CONFIGURATION or stored:
        config = deepspeed_config(workload, job, 1.0)
        own_code = optimizer_code(schedule, context)
        code = None if job.offloads_params else enable_code(schedule, context)
    else:
        ratio = None if policy.name == "gpu-only" else float(policy.value or 1.0)
        # Only a split needs stage 3.
        stage = 3 if policy.name == "twin-flow" else job.stage or 3
        config = deepspeed_config(workload, job, ratio, stage)
    return PolicySetup(
        policy.text, steps.iteration_s * 1e3, config, code, own_code, stored
    )


def best_setup(choice: PolicyChoice, context: PasteContext) -> PolicySetup:
    """Return the lines to paste for the chosen policy, with its overlap."""
    plain = setup_of(choice.best, context)
    overlap, code = choice.overlap, plain.code
    if overlap is None:
        return plain
    if code is not None:
        code = _deepspeed_code(overlap, choice.deepspeed_overlap, code, context)
    return replace(
        plain,
        policy=overlap.steps.plan.policy,
        iteration_ms=overlap.steps.iteration_s * 1e3,
        code=code,
        uses_storage=bool(overlap.steps.plan.stored),
        optimizer_code=optimizer_code(overlap.steps.valid, context, overlap.option),
    )


def _deepspeed_code(
    overlap: OverlapChoice,
    deepspeed: OverlapChoice | None,
    plain: str,
    context: PasteContext,
) -> str:
    """Return the call for a DeepSpeed job with as much overlap as DeepSpeed takes;
    `plain`: the call without any."""
    if deepspeed is None:
        seconds, option, code = overlap.without_s, "none", plain
    else:
        seconds, option = deepspeed.steps.iteration_s, deepspeed.option
        code = enable_code(deepspeed.steps.valid, context, option)
    if option == overlap.option:
        return code
    return (
        f"# DeepSpeed runs it with overlap={option}: {seconds * 1e3:,.0f} ms an "
        f"iteration.\n{code}"
    )


def lines_to_paste(
    choice: PolicyChoice, context: PasteContext, settings: TunableSettings
) -> LinesToPaste:
    """Return the lines to paste for a plan, for each framework."""
    setup, job = best_setup(choice, context), context.job
    config = dict(setup.deepspeed_config)
    if settings.micro_batch is not None:
        config["train_micro_batch_size_per_gpu"] = settings.micro_batch
        config["gradient_accumulation_steps"] = job.micro_steps or 1
        config.pop("train_batch_size", None)
    offloads = setup.policy != "gpu-only"
    fsdp2 = (_FSDP2_HALF if offloads else _FSDP2_MIXED) if settings.ranks > 1 else None
    if offloads:
        optimizer = setup.optimizer_code or optimizer_code(choice.best.valid, context)
    else:
        arguments = ["model.parameters()", *_optimizer_arguments(job), "fused=True"]
        adamw = "\n".join(_call("optimizer = torch.optim.AdamW", arguments))
        optimizer = adamw if fsdp2 is not None else f"import torch\n\n{adamw}"
    checkpointing = _CHECKPOINTING if settings.checkpointing else None
    # Without DeepSpeed where state is in storage, and its parameters are offloaded,
    # too.
    if job.section("zero_optimization") and (
        setup.code is not None or not setup.uses_storage
    ):
        parts = [checkpointing, setup.code or f"deepspeed_config = {config!r}"]
    else:
        parts = [checkpointing, fsdp2, optimizer]
    python = "\n\n".join(part for part in parts if part is not None)
    return LinesToPaste(python, config, setup.code, checkpointing, fsdp2, optimizer)
