"""Changes and reads of a job between its steps; each does the same to the plain job."""

import copy
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from tests.interleave.engine.forked import forked
from tests.interleave.engine.grid.faults import Broken, break_layer
from tests.interleave.engine.grid.job import Event
from tests.interleave.engine.grid.training import Training

Edit = Callable[[Training, random.Random], None]
EDITS: dict[str, Edit] = {}


def edit(name: str) -> Callable[[Edit], Edit]:
    """Register an edit of a name."""

    def register(function: Edit) -> Edit:
        EDITS[name] = function
        return function

    return register


def _param(training: Training, draw: random.Random) -> nn.Parameter:
    return draw.choice(training.params)


@edit("scale")
def scale(training: Training, draw: random.Random) -> None:
    with torch.no_grad():
        _param(training, draw).mul_(draw.choice((0.5, 1.25, -1.0)))


@edit("data")
def scale_data(training: Training, draw: random.Random) -> None:
    _param(training, draw).data.mul_(0.5)


@edit("signs")
def flip_signs(training: Training, draw: random.Random) -> None:
    data = _param(training, draw).data
    chosen = [draw.randrange(data.numel()) for _ in range(4)]
    flat = data.as_strided((data.numel(),), (1,))
    flat[chosen] = -flat[chosen]


@edit("element")
def set_element(training: Training, draw: random.Random) -> None:
    param = _param(training, draw)
    with torch.no_grad():
        param.as_strided((param.numel(),), (1,))[draw.randrange(param.numel())] = 0.25


@edit("clamp")
def clamp(training: Training, draw: random.Random) -> None:
    _param(training, draw).data.clamp_(-0.05, 0.05)


@edit("rows")
def flip_rows(training: Training, draw: random.Random) -> None:
    data = _param(training, draw).data
    data.copy_(data.flip(0))


@edit("swap")
def swap_and_restore(training: Training, draw: random.Random) -> None:
    """Evaluate with other values in another memory, and go on with the old ones."""
    param = _param(training, draw)
    values = param.data
    param.data = 0.5 * values
    training.evaluate(training.call, "evaluation of other values")
    param.data = values


@edit("memory")
def replace_memory(training: Training, draw: random.Random) -> None:
    param = _param(training, draw)
    param.data = 1.5 * param.data.clone()


@edit("all")
def set_all(training: Training, draw: random.Random) -> None:
    with torch.no_grad():
        torch._foreach_mul_(training.params, 0.75)


@edit("buffers")
def scale_buffers(training: Training, draw: random.Random) -> None:
    for buffer in training.net.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.5)


@edit("norms in evaluation")
def freeze_norms(training: Training, draw: random.Random) -> None:
    for module in training.net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train(not module.training)


@edit("save")
def save(training: Training, draw: random.Random) -> None:
    model = copy.deepcopy(training.net.state_dict())
    training.saved = model, copy.deepcopy(training.optimizer.state_dict())


@edit("load")
def load(training: Training, draw: random.Random) -> None:
    """Load what was saved before, or what is there now."""
    if training.saved is None:
        save(training, draw)
    assert training.saved is not None
    model, optimizer = training.saved
    parts = draw.choice(("both", "both", "model", "optimizer"))
    if parts != "optimizer":
        training.net.load_state_dict(model)
    if parts != "model":
        training.optimizer.load_state_dict(copy.deepcopy(optimizer))


@edit("learning rate")
def change_rate(training: Training, draw: random.Random) -> None:
    rate = draw.choice((0.0, 2e-3, torch.tensor(4e-3, dtype=torch.float64)))
    for group in training.optimizer.param_groups:
        group["lr"] = rate


@edit("hyperparameters")
def change_hyperparameters(training: Training, draw: random.Random) -> None:
    changed = {
        "betas": (0.7, 0.8),
        "momentum": 0.5,
        "weight_decay": 0.3,
        "nesterov": False,
    }
    for group in training.optimizer.param_groups:
        group.update({name: value for name, value in changed.items() if name in group})


@edit("freeze")
def freeze(training: Training, draw: random.Random) -> None:
    param = _param(training, draw)
    if sum(one.requires_grad for one in training.params) > 2 or not param.requires_grad:
        param.requires_grad_(not param.requires_grad)


@edit("group")
def add_group(training: Training, draw: random.Random) -> None:
    if training.spare:
        for group in training.groups(training.spare):
            training.optimizer.add_param_group({**group, "lr": 0.02})
    training.spare = []


@edit("evaluate")
def evaluate(training: Training, draw: random.Random) -> None:
    training.evaluate(training.call, "evaluation")


@edit("copy")
def evaluate_copy(training: Training, draw: random.Random) -> None:
    training.evaluate(copy.deepcopy(training.net), "evaluation of a copy")


@edit("twin")
def evaluate_twin(training: Training, draw: random.Random) -> None:
    """Evaluate other modules with the same parameters."""
    if "twin" not in training.references:
        shared: dict[int, Any] = {id(param): param for param in training.params}
        training.references["twin"] = copy.deepcopy(training.net, shared)
    training.evaluate(training.references["twin"], "evaluation of a twin")


@edit("scripted twin")
def evaluate_script(training: Training, draw: random.Random) -> None:
    """Evaluate scripted code with the same parameters."""
    inputs = torch.ones(
        2,
        training.net.head.in_features,
        dtype=training.job.dtype,
        device=training.job.device,
    )
    with torch.no_grad():
        training.record("scripted twin", training.references["script"](inputs))


@edit("view")
def keep_view(training: Training, draw: random.Random) -> None:
    """Keep a view of a parameter, and read the one before."""
    before = training.references.get("view")
    if before is not None:
        training.record("view", before.float().sum())
    training.references["view"] = _param(training, draw).detach()


@edit("average")
def follow_average(training: Training, draw: random.Random) -> None:
    if "average" not in training.references:
        training.references["average"] = [
            param.detach().clone() for param in training.params
        ]
    average = training.references["average"]
    with torch.no_grad():
        torch._foreach_lerp_(average, training.params, 0.5)
    for mean in average:
        training.record("average", mean)


@edit("norm")
def read_norm(training: Training, draw: random.Random) -> None:
    training.record("norm", nn.utils.get_total_norm(training.params))


@edit("thread")
def read_on_thread(training: Training, draw: random.Random) -> None:
    sums: list[torch.Tensor] = []

    def read() -> None:
        for param in training.params:
            sums.append(param.detach().float().sum())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    for value in sums:
        training.record("sum on a thread", value)


@edit("state")
def read_state(training: Training, draw: random.Random) -> None:
    training.record_state()


@edit("resume")
def resume(training: Training, draw: random.Random) -> None:
    """Go on with another optimizer, which has the policy of the job or another one."""
    optimizer = training.optimizer
    is_stored = training.storage is not None and not training.is_plain
    state = optimizer.commit() if is_stored else copy.deepcopy(optimizer.state_dict())
    is_late = training.job.overlap != "none"
    policy = draw.choice(
        (training.job.policy, "interleaved:2", "pipelined" if is_late else "gpu-only")
    )
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group.pop("initial_lr", None)
    optimizer.close()
    training.open_optimizer(groups, policy)
    training.optimizer.load_state_dict(state)


@edit("fork")
def fork(training: Training, draw: random.Random) -> None:
    """Let a child step or read the state, which is its own."""
    if not training.is_plain:
        forked(draw.choice((training.optimizer.step, training.optimizer.state_dict)))


@edit("batch without a step")
def skip_batch(training: Training, draw: random.Random) -> None:
    training.backward()
    training.optimizer.zero_grad()


@edit("step without gradients")
def step_idly(training: Training, draw: random.Random) -> None:
    training.optimizer.step()


@edit("more gradients")
def add_gradients(training: Training, draw: random.Random) -> None:
    training.backward_once()


@edit("failed backward")
def add_gradients_and_fail(training: Training, draw: random.Random) -> None:
    """Gradients of a backward that fails count where nobody drops them."""
    with ExitStack() as stack, suppress(Broken):
        break_layer(training, Event(0, "backward", draw.randrange(12)), stack)
        training.backward_once()


@edit("drop gradient")
def drop_gradient(training: Training, draw: random.Random) -> None:
    _param(training, draw).grad = None


@edit("replace gradient")
def replace_gradient(training: Training, draw: random.Random) -> None:
    param = _param(training, draw)
    if param.requires_grad:
        param.grad = torch.full_like(param, 0.5)
