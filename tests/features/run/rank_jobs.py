"""Scripts of jobs with several ranks, and of jobs that fail."""

from __future__ import annotations

# Its arguments: how the model is divided, and what happens in the middle.
RANKS = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states

division, event = sys.argv[1:3]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                      nn.Linear(64, 32))
generator = torch.Generator().manual_seed(0 if division == "tp" else rank)
options = dict(lr=1e-2, amsgrad=event == "amsgrad" and rank == 1)
optimizer = None
if division == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
if division.startswith("fsdp1"):
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"),
                                     use_orig_params=division == "fsdp1-params")
if division == "fsdp2-late":
    optimizer = torch.optim.AdamW(model.parameters(), **options)
if division.startswith("fsdp2"):
    from torch.distributed.fsdp import fully_shard
    for part in (model[0], model[2], model):
        fully_shard(part)
if division == "tp":
    from torch.distributed.tensor import parallel
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(model, mesh, plan)
if division == "fsdp2-late":
    optimizer.param_groups[0]["params"] = list(model.parameters())
if optimizer is None:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
for step in range(10):
    x = torch.randn(4, 32, generator=generator)
    loss = (model(x) - x).square().mean()
    loss.backward()
    if division not in ("fsdp1", "tp"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 6 and rank == 1 and event == "raise":
        raise RuntimeError("bad data on rank 1")
    if step == 6 and rank == 1 and event == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 6 and event == "checkpoint":
        weights, state = states.get_state_dict(model, optimizer)
        torch.distributed.checkpoint.save({"w": weights, "o": state},
                                          checkpoint_id="saved")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        weights, state = states.get_state_dict(model, optimizer)
        torch.distributed.checkpoint.load({"w": weights, "o": state},
                                          checkpoint_id="saved")
        states.set_state_dict(model, optimizer, model_state_dict=weights,
                              optim_state_dict=state)
    print(f"rank {rank}, step {step}: {loss.item():.4f}\\n", end="", flush=True)
dist.destroy_process_group()
"""

# Its argument: what happens in the middle.
FAILING = """
import multiprocessing, os, signal, sys
import torch
from torch import nn

KIND = sys.argv[1]


def total(model):
    return f"{model[0].weight.detach().double().sum().item():.4f}"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [torch.randn(4, 32) for _ in range(8)]
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(
            batches, batch_size=1, num_workers=2 if KIND == "workers" else 0)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            optimizer.step()
            if number == 5 and epoch == 0:
                happen(model, optimizer)
    print("weights", total(model), flush=True)


def happen(model, optimizer):
    if KIND == "raise":
        raise RuntimeError("the data is bad")
    if KIND == "exit":
        sys.exit(3)
    if KIND == "_exit":
        os._exit(5)
    if KIND.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, KIND))
    if KIND.startswith("fork"):
        child = os.fork()
        if not child:
            if KIND == "fork-steps":
                optimizer.step()
            states = len(optimizer.state_dict()["state"])
            print("child", states, total(model), flush=True)
            sys.exit(0)
        print("child ended with", os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    if KIND in ("child-spawn", "child-fork"):
        context = multiprocessing.get_context(KIND.split("-")[1])
        child = context.Process(target=main)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    main()
    if KIND == "twice":
        main()
"""
