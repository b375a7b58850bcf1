"""Small real training jobs, as people write them. Each runs STEPS updates."""

from __future__ import annotations

from textwrap import dedent

STEPS = 4

# What is imported is no garbage. To collect it, also when the process ends, takes a
# quarter of the time of the import. torch's decorators of these methods, and of the
# steps of torch's optimizers, import torch's compiler at their first call, which takes
# as long as the import of torch.
PRELUDE = f"""
import gc
gc.disable()
import torch
from torch import nn
from torch.nn import functional as F
gc.freeze()
gc.enable()
torch.manual_seed(0)
STEPS = {STEPS}
def batch():
    return torch.randn(8, 16), torch.randn(8, 4)
def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
class PlainSGD(torch.optim.Optimizer):
    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
    def __init__(self, params, lr):
        super().__init__(params, {{"lr": lr}})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad
model = mlp()
optimizer = PlainSGD(model.parameters(), lr=1e-2)
"""
# Follows PRELUDE in jobs that need an optimizer of torch.
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"

PLAIN = """
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# name: (the job, the phases of every iteration)
CASES: dict[str, tuple[str, str]] = {
    "a plain loop": (PLAIN, "forward backward update"),
    "an optimizer for each step": (
        """
        for _ in range(STEPS):
            optimizer = PlainSGD(model.parameters(), lr=1e-2)
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a model after the other": (
        """
        for _ in range(STEPS // 2):
            model = mlp()
            optimizer = PlainSGD(model.parameters(), lr=1e-2)
            for _ in range(2):
                x, y = batch()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            del model, optimizer
        """,
        "forward backward update",
    ),
    "a loss that is a module": (
        """
        criterion = nn.MSELoss()
        for _ in range(STEPS):
            x, y = batch()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward forward backward update",
    ),
    "gradient accumulation": (
        """
        for _ in range(STEPS):
            for _ in range(3):
                x, y = batch()
                (F.mse_loss(model(x), y) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward forward backward forward backward update",
    ),
    "a GradScaler": (
        """
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(STEPS):
            x, y = batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a GradScaler that skips every step": (
        """
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(STEPS):
            x, y = batch()
            scaler.scale(F.mse_loss(model(x), y) * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a GradScaler with a fused optimizer": (
        """
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(STEPS):
            x, y = batch()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a GAN": (
        """
        critic = nn.Linear(4, 1)
        second = torch.optim.SGD(critic.parameters(), lr=1e-2)
        for _ in range(STEPS):
            x, y = batch()
            with torch.no_grad():
                fake = model(x)
            (critic(y).mean() - critic(fake).mean()).backward()
            second.step()
            second.zero_grad()
            (-critic(model(x)).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward forward backward update forward forward backward update",
    ),
    "two optimizers in a row": (
        """
        second = torch.optim.SGD(list(model.parameters())[:2], lr=1e-3)
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            second.step()
            optimizer.zero_grad()
        """,
        "forward backward update update",
    ),
    "LBFGS with a closure": (
        """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        x, y = batch()
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        for _ in range(STEPS):
            optimizer.step(closure)
        """,
        "update",
    ),
    "a compiled model": (
        "model = torch.compile(model, fullgraph=True)\n" + PLAIN,
        "forward backward update",
    ),
    "a compiled model, without a compiler": (
        'model = torch.compile(model, fullgraph=True, backend="aot_eager")\n' + PLAIN,
        "forward backward update",
    ),
    "a model compiled in place": (
        "model.compile(fullgraph=True)\n" + PLAIN,
        "forward backward update",
    ),
    "compiled blocks in a plain model": (
        "model[0] = torch.compile(model[0], fullgraph=True)\nmodel[2].compile()\n"
        + PLAIN,
        "forward backward update",
    ),
    "a compiled function around the model": (
        """
        @torch.compile(fullgraph=True)
        def loss_of(x, y):
            return F.mse_loss(model(x), y)
        head = nn.Linear(1, 1)
        for _ in range(STEPS):
            x, y = batch()
            head(loss_of(x, y).reshape(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a model called twice": (
        """
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x) + model(-x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward forward backward update",
    ),
    "evaluation in between": (
        """
        for step in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(x)
            with torch.inference_mode():
                model(x)
            model.train()
        """,
        "forward backward update",
    ),
    "the optimizer in the backward": (
        """
        optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
        def update(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
        """,
        "forward backward",
    ),
    "checkpointing, reentrant": (
        """
        from torch.utils.checkpoint import checkpoint
        for _ in range(STEPS):
            x, y = batch()
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
            F.mse_loss(model[2](model[1](hidden)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        # the checkpointed call runs without gradients
        "forward forward backward update",
    ),
    "checkpointing, non-reentrant": (
        """
        from torch.utils.checkpoint import checkpoint
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(checkpoint(model, x, use_reentrant=False), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "checkpointing inside the model": (
        """
        from torch.utils.checkpoint import checkpoint
        class Net(nn.Module):
            def __init__(self, reentrant):
                super().__init__()
                self.a, self.b, self.reentrant = mlp(), nn.Linear(4, 4), reentrant
            def forward(self, x):
                return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))
        model = nn.Sequential(Net(True), Net(False).requires_grad_())
        model[1].a = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x.requires_grad_()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a gradient penalty": (
        """
        for _ in range(STEPS):
            x, y = batch()
            x.requires_grad_()
            out = model(x)
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (F.mse_loss(out, y) + gradient.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward backward update",
    ),
    "a learning rate scheduler": (
        """
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "transforms and metrics that are modules": (
        """
        class Scale(nn.Module):
            def forward(self, x):
                return x * 2
        scale = Scale()
        for _ in range(STEPS):
            x, y = batch()
            out = model(scale(x))
            F.mse_loss(out, y).backward()
            scale(out.detach())
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "a model that returns a dictionary": (
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp()
            def forward(self, x, y):
                out = self.net(x)
                return {"loss": F.mse_loss(out, y), "logits": out}
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(STEPS):
            net(*batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update",
    ),
    "optimizer state made before training": (
        dedent(
            """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        get_optimizer_state_dict(model, optimizer)
        """
        )
        + PLAIN,
        "forward backward update",
    ),
    "an optimizer that overrides step": (
        dedent(
            """
        class Mine(torch.optim.AdamW):
            def step(self, closure=None):
                return super().step(closure)
        other = torch.optim.AdamW(mlp().parameters())
        optimizer = Mine(model.parameters())
        """
        )
        + PLAIN,
        "forward backward update",
    ),
    "a step that raises and is tried again": (
        """
        class Flaky(torch.optim.SGD):
            tries = 0
            def step(self, closure=None):
                self.tries += 1
                if self.tries % 2:
                    raise MemoryError("no room")
                return super().step(closure)
        optimizer = Flaky(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            try:
                optimizer.step()
            except MemoryError:
                optimizer.step()
            optimizer.zero_grad()
        """,
        "forward backward update update",
    ),
}
