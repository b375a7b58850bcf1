"""Compare a dry run of a DeepSpeed job with the memory that its log states.

    python benchmarks/dry_run_zero.py [--ranks 4]

The job is the one with 11.3e9 parameters ("13B") of the published measurements of Deep
Optimizer States: ZeRO stage 3 with the optimizer offloaded, 4 A100, micro-batch 1,
context 2048, activation checkpointing. Its model is rebuilt from the arguments of
Megatron-DeepSpeed in the log, with attention in parts. The log is of an older
DeepSpeed. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from extensions import use_own_extensions
from tables import machine_line, table

from ebbtide.profiler.trace import open_trace

# From log-13B-tp1-dp4-...-flush_async0-opt_gaps0.log: bytes that the caching allocator
# has handed out, in GiB, as DeepSpeed states them from the second iteration on.
MEASURED_GIB = {
    "after deepspeed.initialize": 6.20,
    "before the forward": 6.53,
    "peak of the forward": 11.18,
    "after the forward": 10.61,
    "peak of the backward": 12.15,
    "after the backward": 7.49,
    "after the update": 6.53,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 100_000_000,
        "overlap_comm": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "steps_per_print": 1_000_000,
}
JOB = """
import json
import sys
import torch
import deepspeed
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, GROUPS, FFN, CONTEXT, VOCABULARY = 40, 5120, 40, 4, 13824, 2048, 50304
SIZE = WIDTH // HEADS
config = json.loads(sys.argv[1])

class Block(nn.Module):
    products = None  # Megatron has one buffer for the inputs of these products, for all layers

    def buffer(self, q):
        if Block.products is None:
            Block.products = torch.empty(HEADS, CONTEXT, CONTEXT, dtype=q.dtype, device=q.device)
        return Block.products

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key_value = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 2 * GROUPS * SIZE))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * FFN, bias=False), nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, mask):
        length = x.shape[1]
        normed = self.norm_1(x)
        q = self.query(normed).view(1, length, HEADS, SIZE).transpose(1, 2)
        k, v = self.key_value(normed).view(1, length, 2, GROUPS, SIZE).permute(2, 0, 3, 1, 4)
        k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
        scores = torch.baddbmm(self.buffer(q), q[0], k[0].transpose(-1, -2), beta=0, alpha=SIZE**-0.5)
        scores = scores.unsqueeze(0).masked_fill(mask, -1e4)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, length, WIDTH)
        x = x + self.out(attended)
        gate, up = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

with deepspeed.zero.Init(config_dict_or_path=config):
    model = Decoder()
deepspeed.checkpointing.configure(None, deepspeed_config=config)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print("GIB", torch.cuda.memory_allocated() / 2**30, flush=True)
while True:
    tokens = torch.randint(0, VOCABULARY, (1, CONTEXT + 1)).to(engine.device)
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    use_own_extensions()
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.py"), Path(folder, "run.ebb")
        job.write_text(JOB, encoding="utf-8")
        words = [
            "dry-run",
            "-o",
            str(output),
            "--gpu",
            "a100-40gb-published",
            "--ranks",
            str(args.ranks),
        ]
        start_s = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "ebbtide",
            *words,
            "--",
            "python",
            str(job),
            json.dumps(CONFIG),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            text = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        elapsed_s = time.perf_counter() - start_s
        if process.returncode:
            raise SystemExit(
                f"the dry run failed with status {process.returncode}:\n{text}"
            )
        initialized = re.search(r"^GIB ([\d.]+)$", text, re.MULTILINE)
        assert initialized is not None
        predicted = {
            "after deepspeed.initialize": float(initialized[1]),
            **sizes_gib(output),
        }
        trace = open_trace(output)
        params = trace.meta.ranks[0].model.total_params
    print(machine_line())
    for note in trace.meta.notes:
        if note.startswith("host memory"):
            print(note)
    print(
        f"\n{params / 1e9:.2f}e9 parameters: {elapsed_s:.0f} s, "
        f"{usage.ru_maxrss / 1e6:.2f} GB resident\n"
    )
    rows = [
        [
            name,
            f"{size:.2f}",
            f"{predicted[name]:.2f}",
            f"{100 * (predicted[name] / size - 1):+.1f} %",
        ]
        for name, size in MEASURED_GIB.items()
    ]
    table(["allocated, GiB", "measured", "predicted", "error"], rows)


def sizes_gib(path: Path) -> dict[str, float]:
    """Return the bytes that the caching allocator has handed out, at edges and peaks of
    the last iteration's phases."""
    trace = open_trace(path)
    phases = trace.phases(0)
    memory = trace.memory(0)
    line = memory[memory["pool"] == "allocated"]

    def at(t_ns: int) -> float:
        return float(line[line["t_ns"] <= t_ns]["bytes"].iloc[-1]) / 2**30

    last = phases[phases["iteration"] == phases["iteration"].max()].set_index("phase")
    sizes = {"before the forward": at(last.loc["forward", "start_ns"])}
    for phase in ("forward", "backward"):
        start_ns, end_ns = last.loc[phase, "start_ns"], last.loc[phase, "end_ns"]
        inside = line[(line["t_ns"] >= start_ns) & (line["t_ns"] <= end_ns)][
            "bytes"
        ].max()
        sizes[f"peak of the {phase}"] = max(at(start_ns), float(inside) / 2**30)
        sizes[f"after the {phase}"] = at(end_ns)
    return {**sizes, "after the update": at(last.loc["update", "end_ns"])}


if __name__ == "__main__":
    main()
