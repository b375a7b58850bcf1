"""Scripts of jobs that know nothing of ebbtide."""

from __future__ import annotations

# A job as many are: clipping, a schedule, accumulation, a file of checkpoints.
PLAIN = """
import os, sys, torch
from torch import nn
if "seed" not in os.environ.get("JOB", ""):
    torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                      nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
begin = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    begin = saved["step"]
print("begins at", begin)
for step in range(begin, 12):
    for micro in range(2):
        generator = torch.Generator().manual_seed(100 * step + micro)
        x = torch.randn(8, 16, generator=generator)
        (model(x) - x).square().mean().div(2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step == 5:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(), "step": step + 1}, "checkpoint.pt")
        if "stop" in os.environ.get("JOB", ""):
            sys.exit(0)
torch.save([param.detach() for param in model.parameters()],
           os.environ.get("RESULT", "result.pt"))
if "fail" in os.environ.get("JOB", ""):
    sys.exit("the job fails here")
"""

# It waits until it is interrupted, and says so.
WAITING = """
import signal, sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
try:
    while True:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        print("stepped", flush=True)
        time.sleep(0.05)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""

NO_OPTIMIZER = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adagrad(model.parameters())
for step in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""
