"""Jobs of every kind, with the phases of their iterations: they are run bare and
recorded (`test_jobs.py`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from textwrap import dedent

from tests.profiler.agent.jobs import CASES, PLAIN, PRELUDE, STEPS

PYTHON = sys.executable
TWO_RANKS = (
    PYTHON,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "job.py",
)
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "job.py")
STEP = ("forward", "backward", "update")


@dataclass(frozen=True)
class HarmJob:
    """A job, as a script with the name `job.py`.

    Attributes:
        text: The script.
        iterations: The phases of each of its iterations, in order.
        command: The words of the command.
        ranks: Its number of ranks, whose lines are in any order.
        needs: A package that it imports beside torch.
    """

    text: str
    iterations: tuple[tuple[str, ...], ...] = (STEP,) * STEPS
    command: tuple[str, ...] = (PYTHON, "job.py")
    ranks: int = 1
    needs: str = "torch"


# Printed by jobs: all bits of the parameters.
DIGEST = """
print(b''.join(p.detach().numpy().tobytes() for p in model.parameters()).hex())
"""
LOOPS = (
    *(
        "a plain loop",
        "gradient accumulation",
        "a GradScaler",
        "a GradScaler that skips every step",
        "a GAN",
    ),
    *(
        "LBFGS with a closure",
        "a compiled model",
        "a compiled model, without a compiler",
        "evaluation in between",
        "a gradient penalty",
    ),
    *(
        "the optimizer in the backward",
        "checkpointing inside the model",
        "an optimizer for each step",
    ),
    *("two optimizers in a row", "a step that raises and is tried again"),
)

# Bodies after `PRELUDE`, each with STEPS plain iterations.
BODIES = {
    "keyword arguments with names of the recorder": """
        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp()
            def forward(self, x, **names):
                assert set(names) == NAMES, names
                return self.net(x)
        NAMES = {"module", "compiled", "call", "name", "recorder", "original", "args", "kwargs", "hook"}
        model = Named()
        class Optimizer(PlainSGD):
            def step(self, closure=None, original=None, optimizer_index=None, of_torch=None):
                super().step(closure)
        optimizer = Optimizer(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(model(x, **dict.fromkeys(NAMES)), y).backward()
            optimizer.step(original=1, optimizer_index=2, of_torch=3)
            with torch.no_grad():
                model(x, **dict.fromkeys(NAMES))
    """,
    "autocast": """
        for _ in range(STEPS):
            x, y = batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "reinforcement learning": """
        for _ in range(STEPS):
            x, _ = batch()
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=model(x)).sample()
            policy = torch.distributions.Categorical(logits=model(x))
            (-policy.log_prob(actions) * actions.float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "workers of a DataLoader": """
        from torch.utils.data import DataLoader
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8 * STEPS
            def __getitem__(self, index):
                return torch.full((16,), index / 100), torch.full((4,), 1.0)
        if __name__ == "__main__":
            for x, y in DataLoader(Data(), batch_size=8, num_workers=2):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    """,
    "a thread that loads data": """
        import queue, threading
        batches = queue.Queue(2)
        threading.Thread(target=lambda: [batches.put(batch()) for _ in range(STEPS)]).start()
        for _ in range(STEPS):
            x, y = batches.get()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "a spawned process that trains": """
        import multiprocessing
        def work():
            for _ in range(STEPS):
                x, y = batch()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            print(model[0].weight.sum().item().hex())
        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
            print(process.exitcode)
    """,
    "warnings": """
        import warnings
        class Warning_(nn.Module):
            def forward(self, x):
                for level in range(1, 6):
                    warnings.warn(f"forward {level}", stacklevel=level)
                return x
        def warn(gradient):
            for level in range(1, 6):
                warnings.warn(f"backward {level}", stacklevel=level)
        model = nn.Sequential(Warning_(), mlp())
        optimizer = PlainSGD(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            x, y = batch()
            out = model(x)
            out.register_hook(warn)
            F.mse_loss(out, y).backward()
            optimizer.step()
    """,
}

# Ends after STEPS plain iterations.
ENDS = {
    "an exception in the forward": "model(torch.ones(1, 3))\n",
    "an exception in the backward": """
        out = model(batch()[0])
        out.register_hook(lambda gradient: 1 / 0)
        out.sum().backward()
    """,
    "an exception in the step": "model[0].weight.grad = 'none'\noptimizer.step()\n",
    "an exception that the job prints": """
        import traceback
        try:
            model(torch.ones(1, 3))
        except RuntimeError:
            traceback.print_exc()
    """,
    "an exception from another": """
        try:
            model(torch.ones(1, 3))
        except RuntimeError as error:
            raise ValueError("bad shape") from error
    """,
    "an exit code": "raise SystemExit(7)\n",
    "an exit with a message": "raise SystemExit('no more data')\n",
    "os._exit": "import os\nos._exit(5)\n",
    "SIGTERM": "import os\nos.kill(os.getpid(), 15)\n",
    "SIGKILL": "import os\nos.kill(os.getpid(), 9)\n",
    "SIGINT": "import os\nos.kill(os.getpid(), 2)\n",
}

COMMANDS = {
    "python -W error": (PYTHON, "-W", "error", "job.py"),
    "python -I": (PYTHON, "-I", "job.py"),
    "python -m": (PYTHON, "-m", "job"),
    "python -c": (PYTHON, "-c", PRELUDE + PLAIN + DIGEST),
    "standard input": ("sh", "-c", f"{PYTHON} - < job.py"),
}

PYTEST_JOB = PRELUDE + "def test_train():\n    for _ in range(STEPS):\n        step()\n"
PYTEST_JOB += (
    "def step():\n    x, y = batch()\n    F.mse_loss(model(x), y).backward()\n"
    "    optimizer.step()\n    optimizer.zero_grad()\n"
)

RANKS = """
from torch import distributed
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = mlp()
{wrap}
optimizer = PlainSGD(model.parameters(), lr=1e-2)
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
for p in model.parameters():
    print(float(getattr(p, "full_tensor", lambda: p)().sum()).hex())
distributed.destroy_process_group()
"""
WRAPS = {
    "DDP": "model = nn.parallel.DistributedDataParallel(model)",
    "FSDP2": """
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
""",
}

DEEPSPEED = """
import logging, os, sys
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
import deepspeed
torch.manual_seed(0)
logging.disable(logging.WARNING)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
config = {{"train_micro_batch_size_per_gpu": 2, "bf16": {{"enabled": True}}, "zero_optimization": {{"stage": {stage}}}}}
config["optimizer"] = {{"type": "AdamW", "params": {{"torch_adam": True}}}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(4):
    loss = engine(torch.randn(2, 16).bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
    print(loss.item().hex())
torch.distributed.destroy_process_group()
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(24)]
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32))
settings = {"max_steps": 4, "per_device_train_batch_size": 3, "save_strategy": "no", "report_to": []}
trainer = Trainer(model, TrainingArguments("out", disable_tqdm=True, **settings), train_dataset=data)
print(trainer.train().training_loss.hex())
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
for _ in range(STEPS):
    x, y = batch()
    accelerator.backward(F.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""

LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as lightning
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def training_step(self, rows, number):
        loss = F.mse_loss(self.net(rows[0]), rows[1])
        print(loss.item().hex())
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 16), torch.randn(8 * STEPS, 4))
options = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False, "max_epochs": 1}
trainer = lightning.Trainer(accelerator="cpu", enable_model_summary=False, **options)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=8))
"""


def _loop(name: str) -> HarmJob:
    text, phases = CASES[name]
    return HarmJob(PRELUDE + dedent(text) + DIGEST, (tuple(phases.split()),) * STEPS)


JOBS = {
    **{name: _loop(name) for name in LOOPS},
    "a model after the other": HarmJob(
        PRELUDE + dedent(CASES["a model after the other"][0])
    ),
    **{name: HarmJob(PRELUDE + dedent(body)) for name, body in BODIES.items()},
    **{name: HarmJob(PRELUDE + PLAIN + dedent(end)) for name, end in ENDS.items()},
    **{
        name: HarmJob(PRELUDE + PLAIN + DIGEST, command=command)
        for name, command in COMMANDS.items()
    },
    "pytest": HarmJob(PYTEST_JOB, command=PYTEST),
    "pytest -W error": HarmJob(PYTEST_JOB, command=(*PYTEST, "-W", "error")),
    **{
        name: HarmJob(PRELUDE + RANKS.format(wrap=wrap), command=TWO_RANKS, ranks=2)
        for name, wrap in WRAPS.items()
    },
    **{
        f"DeepSpeed ZeRO-{stage}": HarmJob(
            DEEPSPEED.format(stage=stage), needs="deepspeed"
        )
        for stage in (2, 3)
    },
    "Trainer of Hugging Face": HarmJob(TRAINER, needs="transformers"),
    "accelerate": HarmJob(PRELUDE + ACCELERATE + DIGEST, needs="accelerate"),
    "Lightning": HarmJob(PRELUDE + LIGHTNING, needs="pytorch_lightning"),
}
