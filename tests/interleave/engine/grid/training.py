"""The training of a random job, with ebbtide or without."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebbtide.interleave import InterleavedOptimizer, offload_activations, stream_weights
from ebbtide.interleave.engine.layers import model_layers
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.interleave.engine.rules import find_rule
from tests.interleave.engine.grid.devices import GridDevice
from tests.interleave.engine.grid.job import Job
from tests.interleave.engine.grid.models import VOCABULARY, Net, precision
from tests.interleave.engine.grid.reference import ReferenceOptimizer
from tests.interleave.engine.layers.random_planner import RandomPlanner
from tests.interleave.engine.training import MACHINE

Results = list[tuple[str, torch.Tensor]]
# The rule of parameters that are no matrices, where the rule of the job is for matrices.
_RULE_OF_VECTORS = "adamw"
_HOST_BUDGET_BYTES = 2e5


class Training:
    """A job that is trained: plainly, or with ebbtide.

    Attributes:
        results: Names and values of what the job has read so far.
        spare: Parameters that are in no group yet.
        saved: State dicts of the model and of the optimizer; None before they are saved.
    """

    def __init__(self, job: Job, is_plain: bool) -> None:
        self.job, self.is_plain = job, is_plain
        self.results: Results = []
        torch.manual_seed(job.seed)
        random.seed(job.seed)
        np.random.seed(job.seed)
        self.net = Net(job.kinds, job.tied, job.reads_head, job.checkpoints).to(job.dtype)
        self.spare = list(self.net.layers[-1].parameters()) if job.spare else []
        self.rank = 0 if job.ranks is None else dist.get_rank()
        self.tokens = torch.Generator().manual_seed(job.seed + 1000 * self.rank)
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None
        # What the job keeps of its model: views, twins and averages.
        self.references: dict[str, Any] = {}
        self.device: GridDevice | None = None
        self.call: nn.Module = self.net if job.ranks is None else parallel(self.net, job.ranks)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def record(self, name: str, value: torch.Tensor | float) -> None:
        self.results.append((name, local_shard(torch.as_tensor(value)).detach().clone()))

    def loss(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of the next batch, or of these tokens."""
        if tokens is None:
            lengths = self.job.lengths
            length = lengths[int(torch.randint(len(lengths), (), generator=self.tokens))]
            tokens = torch.randint(VOCABULARY, (length,), generator=self.tokens)
        with precision(self.job.autocast):
            return self.call(tokens)

    def backward(self) -> None:
        """Compute the gradients of a step."""
        for _ in range(self.job.accumulation):
            loss = self.loss()
            self.record("loss", loss)
            self.optimizer.scale(loss).backward()

    def evaluate(self, model: nn.Module, name: str) -> None:
        """Record the loss of a model that is evaluated."""
        model.eval()
        with torch.no_grad(), precision(self.job.autocast):
            self.record(name, model(torch.arange(6)))
        model.train()

    def record_state(self) -> None:
        """Record the state of the optimizer."""
        for number, row in enumerate(self.state_rows()):
            self.record(f"state row {number}", row)

    def state_rows(self) -> list[torch.Tensor]:
        """Return masters and moments of all parameters that have them, flat, in the order of memory."""
        if isinstance(self.optimizer, ReferenceOptimizer):
            return self.optimizer.rows()
        states = self.optimizer.state_dict()["state"]
        rules, params = {}, []
        for group in self.optimizer.param_groups:
            rules |= dict.fromkeys(group["params"], find_rule(group.get("rule", self.job.rule)))
            params += group["params"]
        rows = []
        for number, param in enumerate(params):
            if number in states:
                rows += [states[number][name] for name in rules[param].row_names]
        return [_in_memory_order(row) for row in rows]

    def open_optimizer(self, storage: str | None) -> Any:
        """Return a new optimizer of all parameters that are not spare."""
        job = self.job
        spare = set(self.spare)
        params = [param for param in self.params if param not in spare]
        options: dict[str, Any] = {
            "max_grad_norm": job.max_grad_norm,
            "loss_scale": job.loss_scale,
            "master": job.master,
            **dict(job.hyperparameters),
        }
        if self.is_plain:
            return ReferenceOptimizer(self.groups(params), job.rule, **options)
        if job.memory_budget is not None:
            options["memory_budget"] = job.memory_budget
        if storage is not None:
            options |= {"storage": storage, "host_memory_budget": _HOST_BUDGET_BYTES}
        if job.overlap in ("forward", "both", "auto"):
            options["model"] = self.net
        return InterleavedOptimizer(
            self.groups(params),
            job.rule,
            policy=job.policy,
            machine=MACHINE,
            subgroup_params=job.subgroup_params,
            gradients=job.gradients,
            overlap=job.overlap,
            device=self.device,
            threads=1,
            **options,
        )

    def groups(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        """Return the groups of some parameters; a rule for matrices needs one for all others."""
        if find_rule(self.job.rule).finish is None:
            return [{"params": params}]
        matrices = [param for param in params if param.dim() == 2]
        others = [param for param in params if param.dim() != 2]
        of_others = [{"params": others, "rule": _RULE_OF_VECTORS}] if others else []
        return ([{"params": matrices}] if matrices else []) + of_others

    def open(self, stack: ExitStack) -> None:
        """Move layers and make the optimizer; the end of the stack closes them."""
        job, storage = self.job, None
        if not self.is_plain:
            self.device = stack.enter_context(GridDevice.opened(job.seed, job.rates, job.jitter))
            storage = stack.enter_context(tempfile.TemporaryDirectory()) if job.storage else None
            self._move_layers(stack)
        if any(edit.kind == "scripted twin" for edit in job.edits):
            self.references["script"] = torch.jit.script(nn.Sequential(self.net.head))
        self.optimizer = self.open_optimizer(storage)
        stack.callback(lambda: self.optimizer.close())

    def _move_layers(self, stack: ExitStack) -> None:
        job = self.job
        if job.weights is not None:
            stack.enter_context(
                stream_weights(self.net, weights=job.weights, memory_budget=job.weights_budget, device=self.device)
            )
        if job.activations is None:
            return
        is_random = job.activations == "random"
        choice, budget = ("auto", 1e9) if is_random else (job.activations, job.activations_budget)
        activations = offload_activations(self.net, activations=choice, memory_budget=budget, device=self.device)
        stack.enter_context(activations)
        if is_random:
            planner = RandomPlanner(random.Random(10 * job.seed + self.rank), is_limited=False)
            planner.activations = activations
            before = model_layers.plan_orders
            stack.callback(setattr, model_layers, "plan_orders", before)
            model_layers.plan_orders = planner.plan


def parallel(net: Net, kind: str) -> nn.Module:
    """Return a model that is replicated or sharded on all ranks."""
    if kind.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(
            net, gradient_as_bucket_view=kind == "ddp views", find_unused_parameters=kind == "ddp unused"
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=kind == "resharded")
    return fully_shard(net, mesh=mesh)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_shard(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@contextmanager
def deterministic() -> Iterator[None]:
    """Let sums have one order: with one thread, scripted code that is not fused after some calls, and evaluations of
    torch's transformer layers without kernels of their own, which no layer with hooks has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.jit.optimized_execution(False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.set_num_threads(threads)
